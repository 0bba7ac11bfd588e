"""Seeded defects: each one is a session with one rule broken (`mutants.py`), and the random schedules must find it.

A suite that cannot fail on a defect proves nothing about its absence.
"""

from __future__ import annotations

import pytest
from protocol.harness import Harness
from protocol.mutants import (
    BaseIgnored,
    EpochIgnored,
    EpochKeptOnRollback,
    FloorNotAdopted,
    FloorPlusOne,
    HeardWhileGone,
    IncarnationIgnored,
    LateCandidateUnjudged,
    LateContradictionIgnored,
    OldVerdictApplied,
    Overshoot,
    RejectionKeepsEpoch,
    StaleTailKept,
    TailKeptOverRollback,
    TailNotOfferedAgain,
    Unhashed,
)
from protocol.schedule import Faults, Violation

from amusd.protocol.draft_session import DraftSession
from amusd.protocol.messages import Candidate
from amusd.protocol.target_session import Reception, TargetSession

SEEDS = range(150)
"""Budget: each mutant has to be found within so many schedules (most are within ten)."""


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
