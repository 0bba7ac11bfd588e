"""The schedules beside each other: windows by their closed form, and `auto` beside what it has to find by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulation import closed_forms
from simulation.builders import branching, chain, costs, rows_of, simulator, speedup, synchronous, windowed

from amusd.config import DecodingConfig
from amusd.simulation.cost import Duration

AUTO = DecodingConfig(policy="auto")


def test_windows_gain_what_can_be_written_down() -> None:
    """Of a draft that has each window ready before the pass ends; else the target waits, which the form leaves out."""
    machine = simulator(0.9, costs(17.3), num_tokens=1000)
    assert speedup(machine, windowed(8)) == pytest.approx(closed_forms.windowed(0.9, 17.3, 8), rel=0.05)


@pytest.mark.parametrize(("delay", "can_branch"), [(0.2, True), (0.0, False)])
def test_auto_beside_a_draft_that_is_never_right_is_plain_decoding(delay: float, can_branch: bool) -> None:
    machine = simulator(0.0, costs(5, delay=delay), num_answers=8, num_tokens=100)
    assert speedup(replace(machine, can_branch=can_branch), AUTO) >= 0.97


def test_auto_has_a_draft_rest_that_costs_more_than_it_brings() -> None:
    slowed = {0: Duration((6_000_000,), 0.05, together=(7_800_000,))}
    machine = simulator(0.0, costs(6, delay=0.05, spread=0.05, passes=slowed), num_answers=4, num_tokens=256)
    machine = replace(machine, accept_next=0.1, max_candidates=7, can_branch=False)
    assert speedup(machine, AUTO) >= 0.96
    assert speedup(machine, chain(0, max_lookahead=16)) < 1.03 / 1.3


@pytest.mark.parametrize(("a", "row_share"), [(0.05, 1.0), (0.8, 0.1)])
def test_auto_verifies_no_more_than_is_worth_its_row(a: float, row_share: float) -> None:
    machine = simulator(a, costs(6, spread=0.05, passes=rows_of(6, 6 * row_share, 0.05)), num_answers=3, num_tokens=128)
    machine = replace(machine, accept_next=0.3, max_candidates=7)
    settings = [branching(wait, max_lookahead=16) for wait in (0, 2)] + [synchronous(1)]
    assert speedup(machine, AUTO) >= 0.96 * max(1.0, *(speedup(machine, setting) for setting in settings))
