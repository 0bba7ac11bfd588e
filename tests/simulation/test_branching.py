"""The simulated tree: where it is a chain, what it cannot exceed, what its rows cost and bring."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import closed_forms
from simulation.builders import branching, costs, simulator, speedup, synchronous

from amusd.config import DecodingConfig
from amusd.simulation.simulator import Simulator

NARROW = {"fan_out": 2, "rows_per_step": 1, "max_lookahead": 64}
"""One path, as long as the second guess is never right (`accept_next` 0) and so not made."""


def guessing(accept_next: float, machine: Simulator) -> Simulator:
    return replace(machine, accept_next=accept_next)


# Where it is a chain


@pytest.mark.parametrize(("a", "c"), [(0.6, 16), (0.9, 10)])
def test_with_a_wait_it_is_the_chain_that_loses_no_step_to_a_restart(a: float, c: int) -> None:
    """The draft waits for a verdict that is due instead of starting a step that the verdict would find just begun."""
    machine = simulator(a, costs(c), num_tokens=1000)
    assert speedup(machine, branching(1, **NARROW)) == pytest.approx(closed_forms.chain(a, c, 1), rel=0.02)


# Limits


@given(
    st.floats(0.4, 1), st.floats(0, 0.6), st.floats(1.5, 12), st.floats(0, 0.2), st.integers(1, 5), st.integers(1, 8),
    st.integers(0, 3),
)  # fmt: skip
@settings(max_examples=20)
def test_no_tree_exceeds_the_bound_of_one_path(
    a: float, accept_next: float, c: float, delay: float, fan_out: int, rows: int, wait: int
) -> None:
    """Rows do not lift it, even where they are free.

    1 / (1 - a): a pass judges one path, along the first guesses (which a >= (1 - a) accept_next makes the likeliest),
    so every wrong one takes a pass. c / a: nodes of one step are on different paths or at least not behind each other,
    since what follows a node is known only when it has been computed; so a step brings the text on by one token at
    most, however many rows it has, and c is counted in steps of one row, the cheapest.
    """
    machine = guessing(accept_next, simulator(a, costs(c, delay=delay), num_tokens=150))
    gained = speedup(machine, branching(wait, fan_out=fan_out, rows_per_step=rows))
    assert gained <= closed_forms.upper_bound(machine.accept, c) * 1.02


# What auto makes of a tree


def pair(c: float, row_share: float) -> Simulator:
    """A pass takes `c` draft steps and eight rows; a node more makes a step longer by `row_share`."""
    machine = simulator(0.8, costs(c, spread=0.05, tree_row_ns=round(row_share * 1e6)), num_answers=12, num_tokens=96)
    return replace(machine, accept_next=0.4, max_candidates=7)


@pytest.mark.parametrize(("c", "row_share", "block", "least"), [(20, 0.06, 7, 1.2), (7, 0.0, 5, 1.48)])
def test_auto_is_well_ahead_of_the_best_block_where_the_draft_is_right_four_times_in_five(
    c: float, row_share: float, block: int, least: float
) -> None:
    """With eight nodes a step at most, it is 1.19 and 1.46 times as fast here."""
    machine = pair(c, row_share)
    assert speedup(machine, DecodingConfig()) > least * speedup(machine, synchronous(block))
