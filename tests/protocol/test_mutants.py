"""Seeded defects: each one is a session with one rule broken, and the random schedules must find it.

A suite that cannot fail on a defect proves nothing about its absence.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from protocol.harness import Faults, Harness, Violation

from amusd.protocol.draft_session import DraftSession, Transition
from amusd.protocol.messages import Candidate, Verdict
from amusd.protocol.target_session import Reception, TargetSession

SEEDS = range(150)
"""Budget: each mutant has to be found within so many schedules (most are within ten)."""


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

    def receive(self, candidate: Candidate) -> Reception:
        self._chain_end = max(self._chain_end, candidate.start)
        return super().receive(candidate)


class IncarnationIgnored(Unhashed):
    """Candidates of an earlier life of the draft are taken."""

    def receive(self, candidate: Candidate) -> Reception:
        self._incarnation = candidate.incarnation
        return super().receive(candidate)


class HeardWhileGone(Unhashed):
    """What a lost draft had sent is taken into the forgotten chain when it arrives late."""

    def receive(self, candidate: Candidate) -> Reception:
        attached, self._attached = self._attached, True
        try:
            return super().receive(candidate)
        finally:
            self._attached = attached


class LateCandidateUnjudged(Unhashed):
    """The pass commits the candidate behind the block without judging it."""

    def commit(self, token_ids: Sequence[int], num_accepted: int) -> None:
        judged = self.candidates_to_judge()
        block = self._verifying()
        if num_accepted == len(block.candidates) < len(judged):
            token_ids = (*token_ids[:-1], judged[-1])
            num_accepted = len(judged)
        super().commit(token_ids, num_accepted)


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


TARGET_MUTANTS = [
    FloorPlusOne,
    RejectionKeepsEpoch,
    LateContradictionIgnored,
    StaleTailKept,
    EpochIgnored,
    BaseIgnored,
    IncarnationIgnored,
    HeardWhileGone,
    LateCandidateUnjudged,
    Overshoot,
]
DRAFT_MUTANTS = [EpochKeptOnRollback, TailKeptOverRollback, FloorNotAdopted, TailNotOfferedAgain, OldVerdictApplied]
FAULTS = Faults(lose=0.1, duplicate=0.1, restart=0.02, vanish=0.01, right=0.6)


def violation(seed: int, target: type[TargetSession], draft: type[DraftSession]) -> str | None:
    """What goes wrong under this schedule: an invariant, or a draft that is never heard again after the faults."""
    harness = Harness(seed=seed, faults=FAULTS, max_length=40, target_class=target, draft_class=draft)
    try:
        harness.run()
        unfinished = Harness(seed=seed, faults=FAULTS, max_length=400, target_class=target, draft_class=draft)
        for _ in range(60):
            unfinished.step()
        unfinished.settle()
        if unfinished.target.num_candidates == 0:
            return "the draft is not heard again"
    except (Violation, ValueError) as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - a crash of a mutant is a find as well
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("mutant", TARGET_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_every_defect_of_the_target_is_found(mutant: type[TargetSession]) -> None:
    assert any(violation(seed, mutant, DraftSession) for seed in SEEDS)


@pytest.mark.parametrize("mutant", DRAFT_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_every_defect_of_the_draft_is_found(mutant: type[DraftSession]) -> None:
    assert any(violation(seed, Unhashed, mutant) for seed in SEEDS)


def test_the_same_schedules_find_nothing_in_the_real_sessions() -> None:
    """With and without the hash: the rules alone are enough."""
    for seed in SEEDS:
        assert violation(seed, TargetSession, DraftSession) is None
        assert violation(seed, Unhashed, DraftSession) is None


class SpliceHashed(TargetSession):
    """Believes that any candidate connects, as `BaseIgnored` does, but looks at the hash."""

    def receive(self, candidate: Candidate) -> Reception:
        self._chain_end = max(self._chain_end, min(candidate.start, self._stream.length))
        return super().receive(candidate)


def test_the_prefix_hash_stops_at_run_time_what_a_broken_rule_lets_through() -> None:
    """Spliced candidates are dropped, none is evaluated behind a foreign prefix, and the text is the target's."""
    receptions: set[Reception] = set()
    faults = Faults(lose=0.1, duplicate=0.1, restart=0.02, right=0.6)
    for seed in range(60):
        harness = Harness(seed=seed, faults=faults, target_class=SpliceHashed)
        harness.run()
        receptions |= set(harness.receptions)
    assert Reception.FOREIGN in receptions
