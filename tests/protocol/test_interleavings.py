"""The two sessions under random interleavings, chunkings and delays, with and without loss, duplicates and restarts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol.harness import Faults, Harness

from amusd.protocol.target_session import Reception

FAULTS = {
    "none": Faults(),
    "perfect draft": Faults(right=1.0),
    "losses": Faults(lose=0.15, right=0.5),
    "everything": Faults(lose=0.1, duplicate=0.1, restart=0.02, vanish=0.01, right=0.6),
}


@pytest.mark.parametrize("name", FAULTS)
@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), max_lookahead=st.integers(1, 9), max_length=st.integers(5, 40))
def test_text_is_the_targets_under_any_schedule(name: str, seed: int, max_lookahead: int, max_length: int) -> None:
    harness = Harness(seed=seed, faults=FAULTS[name], max_lookahead=max_lookahead, max_length=max_length)
    harness.run()
    assert Reception.FOREIGN not in harness.receptions
    if name == "perfect draft" and harness.fan_out == 1:
        assert harness.num_rollbacks == 0
        assert Reception.CONTRADICTED not in harness.receptions


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_really_happens(name: str) -> None:
    """The runs above prove something only if acceptances, rollbacks, gaps and stale messages occur in them."""
    harnesses = [Harness(seed=seed, faults=FAULTS[name]) for seed in range(20)]
    for harness in harnesses:
        harness.run()
    receptions = {reception for harness in harnesses for reception in harness.receptions}
    assert sum(harness.num_accepted for harness in harnesses) > 0
    if name != "perfect draft":
        assert sum(harness.num_rollbacks for harness in harnesses) > 0
        assert {Reception.TAKEN, Reception.STALE, Reception.CONTRADICTED} <= receptions
    if name == "everything":
        assert sum(harness.num_returns for harness in harnesses) > 0
        assert sum(harness.num_alone for harness in harnesses) > 0
    if name == "losses":
        assert sum(harness.num_gaps for harness in harnesses) > 0
    assert sum(harness.num_adopted for harness in harnesses) > 8
    assert sum(harness.num_alternatives for harness in harnesses) > 16
    assert sum(harness.num_accepted_alternatives for harness in harnesses) > 1 or name == "perfect draft"


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), num_steps=st.integers(0, 150))
def test_a_flawless_draft_is_heard_again_after_any_faults(seed: int, num_steps: int) -> None:
    """Wherever a run stands, two round trips without faults bring fresh candidates back to the target."""
    harness = Harness(seed=seed, faults=FAULTS["everything"], max_length=400)
    for _ in range(num_steps):
        harness.step()
    harness.settle()
    assert harness.target.num_candidates > 0
    assert harness.knows_all
    harness.check()


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), num_steps=st.integers(0, 250), num_alone=st.integers(0, 12))
def test_a_draft_that_comes_back_is_heard_whatever_was_committed_without_it(
    seed: int, num_steps: int, num_alone: int
) -> None:
    """Opened anew at any committed prefix, also during a pass, while messages of its former life still arrive."""
    harness = Harness(seed=seed, faults=FAULTS["everything"], max_length=400)
    for _ in range(num_steps):
        harness.step()
    harness.lose_draft()
    assert harness.target.num_candidates == 0
    assert not harness.target.may_get_more
    for _ in range(num_alone):
        harness.begin()
        harness.commit()
        harness.deliver()
        harness.check()
    harness.restart_draft()
    harness.settle()
    assert harness.target.num_candidates > 0
    assert harness.knows_all
    harness.check()
