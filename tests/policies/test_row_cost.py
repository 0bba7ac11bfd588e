"""What a further row of a step costs, found from steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amusd.policies.estimates import DRAFT_ROW_SHARE, RowCost


@given(st.floats(0, 1), st.lists(st.integers(1, 16), min_size=30, max_size=60, unique=False))
def test_the_share_of_a_row_is_found_whatever_the_steps(share: float, sizes: list[int]) -> None:
    cost = RowCost(DRAFT_ROW_SHARE)
    for rows in (1, 8, *sizes):
        cost.passed(rows, round(1e6 * (1 + share * (rows - 1))))
    assert cost.row_share == pytest.approx(share, abs=0.001)


def test_a_price_that_nothing_confirms_is_forgotten() -> None:
    cost = RowCost()
    cost.passed(1, 1_000_000)
    cost.passed(8, 7_300_000)
    assert cost.row_ns == pytest.approx(900_000, rel=0.01)
    for _ in range(1000):
        cost.passed(1, 1_000_000)
    assert cost.row_ns < 10_000


def test_a_row_never_costs_more_than_a_pass_over_as_many_took() -> None:
    """A first pass that was held up makes rows look dear; there is no other yet that it could be compared with."""
    cost = RowCost()
    cost.passed(8, 976_000_000)
    cost.passed(1, 40_000_000)
    assert cost.row_ns == 40_000_000
    cost.passed(4, 60_000_000)
    assert cost.row_ns <= 15_000_000


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_a_step_that_was_held_up_says_nothing_of_rows(rows: int) -> None:
    """One of 300 ms among 200 of 5 ms: rows looked free or dear for 50 steps, and trees lost 5 % beside chains."""
    cost = RowCost(DRAFT_ROW_SHARE)
    for size in (1, 8, 16) * 20:
        cost.passed(size, 4_000_000 + 400_000 * size)
    found = cost.row_share
    cost.passed(rows, 300_000_000)
    assert cost.row_share == found == pytest.approx(1 / 11, rel=0.01)


def test_steps_that_stay_slow_are_no_stalls() -> None:
    cost = RowCost()
    for factor in (1, 20):
        for size in (1, 8) * 200:
            cost.passed(size, factor * (900_000 + 100_000 * size))
    assert cost.row_ns == pytest.approx(2_000_000, rel=0.01)
