"""Sessions with one rule broken: what the schedules of this folder, and those of `faults/`, must find."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from amusd.protocol.draft_session import DraftSession, Transition
from amusd.protocol.messages import Candidate, Prepared, Verdict
from amusd.protocol.target_session import Reception, TargetSession
from amusd.protocol.tree_draft_session import Adoption, Node, TreeDraftSession
from amusd.protocol.tree_target_session import TreeTargetSession
from amusd.protocol.verification import PassOutcome

# A chain


class Unhashed(TargetSession):
    """Without the prefix hash, the last line of defence, so that the rule under test has to hold by itself."""

    def _prefix_fits(self, candidate: Candidate) -> bool:
        return True


class FloorPlusOne(Unhashed):
    """`floor + 1` instead of `max(floor, epoch + 1)`."""

    def _floor_above(self, epoch: int) -> int:
        return self._epoch_floor + 1


class RejectionKeepsEpoch(Unhashed):
    """The floor does not rise on a rejection or a contradicted bonus token at the end of a pass."""

    def _advance(self, token_ids: tuple[int, ...]) -> None:
        start = self._stream.committed_length
        self._stream.truncate(start + self._stream.matching_prefix(start, token_ids))
        self._stream.extend_tail(token_ids[self._stream.length - start :])
        self._stream.commit(start + len(token_ids))


class LateContradictionIgnored(Unhashed):
    """The chain's own token is not compared with a bonus token that was committed before it arrived."""

    def _contradicts(self, start: int, token_ids: Sequence[int]) -> bool:
        return False


class StaleTailKept(Unhashed):
    """What follows a rejected candidate stays in the tail."""

    def _advance(self, token_ids: tuple[int, ...]) -> None:
        start = self._stream.committed_length
        rest = self._stream.slice(start + len(token_ids), self._stream.length)
        super()._advance(token_ids)
        self._stream.truncate(self._stream.committed_length)
        self._stream.extend_tail(rest)


class EpochIgnored(Unhashed):
    """Candidates from before a rollback are taken."""

    def _live_epoch(self) -> int:
        return 0


class BaseIgnored(Unhashed):
    """A new chain is believed to connect, wherever it starts."""

    def receive(self, candidate: Candidate, rows: Sequence[Any] = ()) -> Reception:
        self._chain_end = max(self._chain_end, candidate.start)
        return super().receive(candidate, rows)


class IncarnationIgnored(Unhashed):
    """Candidates of an earlier life of the draft are taken."""

    def receive(self, candidate: Candidate, rows: Sequence[Any] = ()) -> Reception:
        self._incarnation = candidate.incarnation
        return super().receive(candidate, rows)


class HeardWhileGone(Unhashed):
    """What a lost draft had sent is taken into the forgotten chain when it arrives late."""

    def receive(self, candidate: Candidate, rows: Sequence[Any] = ()) -> Reception:
        attached, self._attached = self._attached, True
        try:
            return super().receive(candidate, rows)
        finally:
            self._attached = attached


class LateCandidateUnjudged(Unhashed):
    """The pass commits the candidate behind the block without judging it."""

    def commit(self, token_ids: Sequence[int], num_accepted: int, *, ends: bool = False) -> PassOutcome:
        judged = self.candidates_to_judge()
        block = self._verifying()
        if num_accepted == len(block.candidates) < len(judged):
            token_ids = (*token_ids[:-1], judged[-1])
            num_accepted = len(judged)
        return super().commit(token_ids, num_accepted, ends=ends)


class Overshoot(Unhashed):
    """A block may fill the text, and the token behind it goes beyond the limit."""

    @property
    def remaining(self) -> int:
        return super().remaining + 1


class EpochKeptOnRollback(DraftSession):
    """The draft throws tokens away without raising its epoch."""

    def preview(self, verdict: Verdict) -> Transition | None:
        transition = super().preview(verdict)
        if transition is None:
            return None
        return Transition(
            transition.keep,
            transition.token_ids,
            transition.committed_length,
            transition.num_discarded,
            max(self.epoch, verdict.epoch_floor),
        )


class TailKeptOverRollback(DraftSession):
    """The draft goes on behind a token that was rejected."""

    def apply(self, transition: Transition) -> None:
        tail = self._stream.slice(transition.committed_length, self._stream.length)
        super().apply(transition)
        if transition.num_discarded:
            self._stream.extend_tail(tail)


class FloorNotAdopted(DraftSession):
    """The draft does not hear that the target waits for a higher epoch."""

    def preview(self, verdict: Verdict) -> Transition | None:
        transition = super().preview(verdict)
        if transition is None:
            return None
        epoch = self.epoch + (transition.num_discarded > 0)
        return Transition(
            transition.keep, transition.token_ids, transition.committed_length, transition.num_discarded, epoch
        )


class TailNotOfferedAgain(DraftSession):
    """After a lost message the draft takes up the new epoch, but not the tokens that the target lacks."""

    def apply(self, transition: Transition) -> None:
        offered = self._offered_length
        super().apply(transition)
        if not transition.num_discarded:
            self._offered_length = max(offered, self.base)


class OldVerdictApplied(DraftSession):
    """A verdict of an earlier life, or one that is already known, is applied again."""

    def preview(self, verdict: Verdict) -> Transition | None:
        if verdict.start + len(verdict.token_ids) > self.base:
            return super().preview(verdict)
        self._stream._committed_length = verdict.start + len(verdict.token_ids)
        return super().preview(verdict)


# A tree


class IgnoresTheLife(TreeTargetSession):
    """Nodes of an earlier life of the draft are taken."""

    def receive(self, prepared: Prepared) -> Reception:
        return super().receive(dataclasses.replace(prepared, incarnation=self._incarnation))


class KeepsTheTree(TreeTargetSession):
    """What follows a token that was not committed stays."""

    def _advance(self, token_ids: tuple[int, ...]) -> None:
        children = self._children
        super()._advance(token_ids)
        self._children = self._children or children


class DoesNotCompare(TreeTargetSession):
    """A node whose place was committed by something else counts as committed."""

    def _place(self, number: int, parent: int, root: int, token_id: int, weight: int) -> bool:
        if not super()._place(number, parent, root, token_id, weight):
            self._passed[number] = self._stream.committed_length - 1
        return True


class HangsEverythingOnTheEnd(TreeTargetSession):
    """A node hangs behind what is committed now, instead of its root."""

    def _place(self, number: int, parent: int, root: int, token_id: int, weight: int) -> bool:
        return super()._place(number, parent, self._stream.committed_length, token_id, weight)


class KeepsItsTree(TreeDraftSession):
    """The draft goes on with its tree behind a token that was not in it."""

    def apply(self, adoption: Adoption) -> None:
        children = self._root.children
        super().apply(adoption)
        if not self._root.children:
            self._root.children = [child for child in children if child not in adoption.kept]
            self._num_nodes = len(list(self._root.below()))


class NamesTheOldRoot(TreeDraftSession):
    """The draft names no parents."""

    def _number_of(self, parent: Node | None) -> int:
        return 0
