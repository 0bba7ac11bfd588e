"""The real sessions take no step that the model does not know, so what was shown of the model holds for them."""

from __future__ import annotations

from collections import Counter

import pytest
from model_checking.conformance import Departure, Follower
from model_checking.test_exploration import EVERY_ACTION
from protocol.harness import Faults, Harness
from protocol.mutants import DRAFT_MUTANTS, TARGET_MUTANTS, Unhashed

from amusd.protocol.draft_session import DraftSession
from amusd.protocol.target_session import TargetSession

FAULTS = (
    Faults(lose=0.1, duplicate=0.2, restart=0.02, vanish=0.01, right=0.6),
    # Gaps that no rollback hides.
    Faults(lose=0.3, duplicate=0.2, restart=0.01, right=0.95),
)


def follow(
    seed: int,
    fan_out: int,
    target_class: type[TargetSession] = TargetSession,
    draft_class: type[DraftSession] = DraftSession,
) -> Counter[str]:
    """The model's steps in one run to the end. Raises `Departure`."""
    harness = Harness(
        seed=seed,
        faults=FAULTS[seed % 2],
        fan_out=fan_out,
        max_length=5 + seed % 17,
        max_lookahead=1 + seed % (5 if fan_out == 1 else 3),
        target_class=target_class,
        draft_class=draft_class,
    )
    follower = Follower(harness)
    harness.run()
    return follower.actions


@pytest.mark.parametrize(("fan_out", "num_seeds"), [(1, 200), (2, 60)])
def test_every_step_of_the_real_sessions_is_a_step_of_the_model(fan_out: int, num_seeds: int) -> None:
    actions = sum((follow(seed, fan_out) for seed in range(num_seeds)), Counter())
    print(actions)  # noqa: T201 - how much was followed
    assert set(actions) == EVERY_ACTION
    assert min(actions.values()) > 30


@pytest.mark.parametrize("fan_out", [1, 2])
@pytest.mark.parametrize("mutant", TARGET_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_target_with_a_broken_rule_leaves_the_model(mutant: type[TargetSession], fan_out: int) -> None:
    assert any(departs(seed, fan_out, mutant, DraftSession) for seed in range(150))


@pytest.mark.parametrize("fan_out", [1, 2])
@pytest.mark.parametrize("mutant", DRAFT_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_draft_with_a_broken_rule_leaves_the_model(mutant: type[DraftSession], fan_out: int) -> None:
    assert any(departs(seed, fan_out, Unhashed, mutant) for seed in range(150))


def departs(seed: int, fan_out: int, target_class: type[TargetSession], draft_class: type[DraftSession]) -> bool:
    try:
        follow(seed, fan_out, target_class, draft_class)
    except Departure:
        return True
    return False
