"""Seeded defects: each one is a session with one rule broken (`mutants.py`), and the random schedules must find it.

A suite that cannot fail on a defect proves nothing about its absence. A chain and a tree, each has to find them all.
"""

from __future__ import annotations

from typing import Any

import pytest
from protocol.harness import Faults, Harness, Violation
from protocol.mutants import DRAFT_MUTANTS, TARGET_MUTANTS, Unhashed

from amusd.protocol.draft_session import DraftSession
from amusd.protocol.target_session import TargetSession

SEEDS = range(150)
"""Budget: each mutant has to be found within so many schedules (most are within ten)."""
FAULTS = Faults(lose=0.1, duplicate=0.1, restart=0.02, vanish=0.01, right=0.6)
LOSSES = Faults(lose=0.3, duplicate=0.1, restart=0.01, right=0.95)
"""Gaps that no rollback hides."""
FAN_OUTS = (1, 2)


def violation(seed: int, fan_out: int, target: type[TargetSession], draft: type[DraftSession]) -> str | None:
    """What goes wrong under this schedule: an invariant, or a draft that is never heard again after the faults."""
    options: dict[str, Any] = {"fan_out": fan_out, "target_class": target, "draft_class": draft}
    harness = Harness(seed=seed, faults=FAULTS, max_length=40, **options)
    try:
        harness.run()
        unfinished = Harness(seed=seed, faults=LOSSES, max_length=400, **options)
        for _ in range(60):
            unfinished.step()
        unfinished.settle()
        if not unfinished.knows_all:
            return "the target lacks what the draft has"
    except (Violation, ValueError) as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - a crash of a mutant is a find as well
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("fan_out", FAN_OUTS)
@pytest.mark.parametrize("mutant", TARGET_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_every_defect_of_the_target_is_found(mutant: type[TargetSession], fan_out: int) -> None:
    assert any(violation(seed, fan_out, mutant, DraftSession) for seed in SEEDS)


@pytest.mark.parametrize("fan_out", FAN_OUTS)
@pytest.mark.parametrize("mutant", DRAFT_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_every_defect_of_the_draft_is_found(mutant: type[DraftSession], fan_out: int) -> None:
    assert any(violation(seed, fan_out, Unhashed, mutant) for seed in SEEDS)


@pytest.mark.parametrize("fan_out", FAN_OUTS)
def test_the_same_schedules_find_nothing_in_the_real_sessions(fan_out: int) -> None:
    """Without the hash: the rules alone are enough."""
    for seed in SEEDS[:40]:
        assert violation(seed, fan_out, Unhashed, DraftSession) is None
