"""Sessions with one rule broken: what the schedules of this folder, and those of `faults/`, must find."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from msgspec import structs

from amusd.protocol.draft_session import DraftSession, Node, Transition
from amusd.protocol.messages import Candidate, Verdict
from amusd.protocol.target_session import Reception, TargetSession, _Node
from amusd.protocol.verification import PassOutcome


class Unhashed(TargetSession):
    """Without the prefix hash, the last line of defence, so that the rule under test has to hold by itself."""

    def _prefix_fits(self, candidate: Candidate) -> bool:
        return True


class IncarnationIgnored(Unhashed):
    """Candidates of an earlier life of the draft are taken."""

    def receive(self, candidate: Candidate, rows: Sequence[Any] = ()) -> Reception:
        return super().receive(structs.replace(candidate, incarnation=self._incarnation), rows)


class TreeKeptOverRestart(Unhashed):
    """The target takes the new life for the continuation of the old one, numbers included."""

    def attach(self, incarnation: int) -> None:
        kept = self._children, self._nodes, self._passed, self._next_number
        super().attach(incarnation)
        self._children, self._nodes, self._passed, self._next_number = kept


class ContradictedTreeKept(Unhashed):
    """What follows a token that was not committed stays."""

    def _advance(self, token_ids: tuple[int, ...]) -> None:
        children = self._children
        super()._advance(token_ids)
        self._children = self._children or children


class PassedNumbersForgotten(Unhashed):
    """What was committed is forgotten as soon as it is, and what follows it counts as following the end."""

    def _place(self, node: _Node, root: int, parent: int) -> Reception:
        if parent in self._passed:
            self._passed[parent] = self._prefix.length - 1
        return super()._place(node, root, parent)


class LateContradictionIgnored(Unhashed):
    """The draft's own token is not compared with a token that was committed before it arrived."""

    def _compare(self, node: _Node) -> Reception:
        self._passed[node.number] = self._prefix.length - 1
        return Reception.TAKEN


class RootIgnored(Unhashed):
    """A node without a parent hangs behind what is committed now, instead of its root."""

    def _place(self, node: _Node, root: int, parent: int) -> Reception:
        return super()._place(node, self._prefix.length, parent)


class OrphansTaken(Unhashed):
    """A node whose parent is not known, because it was contradicted or lost, hangs behind what is committed."""

    def _place(self, node: _Node, root: int, parent: int) -> Reception:
        if parent and parent not in self._nodes and parent not in self._passed:
            return super()._place(node, self._prefix.length, 0)
        return super()._place(node, root, parent)


class LossUnnoticed(Unhashed):
    """No new epoch begins where numbers are missing."""

    def _note_numbers(self, first: int, number: int) -> None:
        self._next_number = max(self._next_number, first + number)


class LateCandidateUnjudged(Unhashed):
    """The pass commits the candidate behind the block without judging it."""

    def commit(self, token_ids: Sequence[int], num_accepted: int, *, ends: bool = False) -> PassOutcome:
        block, judged = self._verifying(), self.candidates_to_judge()
        if not block.alternatives and num_accepted == len(block.candidates) < len(judged):
            token_ids = (*token_ids[:-1], judged[-1])
            num_accepted = len(judged)
        return super().commit(token_ids, num_accepted, ends=ends)


class Overshoot(Unhashed):
    """A block may fill the text, and the token behind it goes beyond the limit."""

    @property
    def remaining(self) -> int:
        return super().remaining + 1


class TreeKeptOverRollback(DraftSession):
    """The draft goes on with its tree behind a token that was not in it."""

    def apply(self, transition: Transition) -> None:
        children = self._root.children
        super().apply(transition)
        if not self._root.children:
            self._root.children = [child for child in children if child not in transition.kept]
            self._num_nodes = len(list(self._root.below()))
            self._unsent += [node for node in self._root.below() if not node.number and node not in self._unsent]


class ParentsUnnamed(DraftSession):
    """Every node claims to follow the root."""

    def _number_of(self, parent: Node | None) -> int:
        return 0


class NumbersGivenTwice(DraftSession):
    """In a new epoch the draft counts from 1 again."""

    def apply(self, transition: Transition) -> None:
        if transition.epoch > self._epoch:
            self._next_number = 1
        super().apply(transition)


class EpochNotAdopted(DraftSession):
    """The draft does not hear that something was lost."""

    def preview(self, verdict: Verdict) -> Transition | None:
        return super().preview(structs.replace(verdict, epoch=0))


class LostNotOfferedAgain(DraftSession):
    """In a new epoch the draft offers only what is new, not what the target lacks."""

    def apply(self, transition: Transition) -> None:
        super().apply(dataclasses.replace(transition, epoch=self._epoch))
        self._epoch = transition.epoch


class OldVerdictApplied(DraftSession):
    """A verdict of an earlier life, or one that is already known, is applied again."""

    def preview(self, verdict: Verdict) -> Transition | None:
        length = verdict.start + len(verdict.token_ids)
        if length < self.base:
            self._prefix = type(self._prefix)(self._prefix.slice(0, length))
            self._root = self._new_root()
            self._num_nodes, self._unsent, self._guesses = 0, [], []
        return super().preview(verdict)


TARGET_MUTANTS = (
    IncarnationIgnored,
    TreeKeptOverRestart,
    ContradictedTreeKept,
    PassedNumbersForgotten,
    LateContradictionIgnored,
    RootIgnored,
    OrphansTaken,
    LossUnnoticed,
    LateCandidateUnjudged,
    Overshoot,
)
DRAFT_MUTANTS = (
    TreeKeptOverRollback,
    ParentsUnnamed,
    NumbersGivenTwice,
    EpochNotAdopted,
    LostNotOfferedAgain,
    OldVerdictApplied,
)
