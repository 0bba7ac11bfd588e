"""`auto` beside the best fixed schedule, found by trying all on the same answers, over drafts, speeds and distances."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from simulation.builders import branching, chain, costs, rows_of, simulator, speedup, synchronous

from amusd.config import DecodingConfig
from amusd.policies.observer import Observer
from amusd.simulation.cost import Costs, Duration
from amusd.simulation.simulator import Simulator
from amusd.simulation.tokens import drawn_answers

AUTO = DecodingConfig(policy="auto")
FIXED = (
    *(DecodingConfig(mode="synchronous", num_speculative_tokens=length) for length in (4, 7)),
    DecodingConfig(policy="windowed", num_speculative_tokens=4),  # other lengths: at most 0.9 of the best of these
    *(DecodingConfig(policy=policy, min_candidates=n) for policy in ("chain", "branching") for n in (0, 1, 2, 4)),
)
ACCEPTS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
SPREAD = 0.05


def times(ms: float, *, stalls: bool) -> Duration:
    """With stalls, one of 200 takes 300 ms."""
    ns = round(ms * 1e6)
    return Duration((ns,) * 199 + (300_000_000,), SPREAD) if stalls else Duration((ns,), SPREAD)


def pair(pass_ms: float, chain_ms: float, tree_ms: float, row_ms: float, link_ms: float, *, stalls: bool) -> Costs:
    link = Duration.of_ms(link_ms)
    return Costs(
        passes={0: Duration.of_ms(pass_ms, SPREAD)},
        draft_token=times(chain_ms, stalls=stalls),
        tree_steps={1: times(tree_ms, stalls=stalls)},
        tree_row_ns=round(row_ms * 1e6),
        to_target=link,
        to_draft=link,
    )


def share_of_best(costs: Costs, accept: float) -> float:
    answers = drawn_answers(accept, num_answers=6, num_tokens=160, seed=0)
    machine = Simulator(costs=costs, answers=answers, max_candidates=7, accept_next=0.4)
    best = max(machine.run(decoding).tokens_per_second for decoding in FIXED)
    return machine.run(AUTO).tokens_per_second / best


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stalls", [False, True])
def test_auto_reaches_the_best_fixed_schedule(stalls: bool) -> None:
    shares = [
        share_of_best(pair(40, 40 / ratio, 40 / ratio, 2.4 / ratio, 40 * delay, stalls=stalls), accept)
        for delay in (0.0, 0.1, 0.2)
        for accept in ACCEPTS
        for ratio in (3, 5, 10, 20)
    ]
    assert statistics.median(shares) >= 0.985  # the best of eleven is lucky: one that is best in another run, 0.99
    assert min(shares) >= 0.95


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("accept", [0.5, 0.6, 0.7, 0.8, 0.9])
@pytest.mark.parametrize("costs", [(33, 2.4, 3.0, 0.20), (33, 2.7, 2.9, 0.10), (5.4, 1.26, 1.26, 0.02)])
def test_auto_reaches_it_with_measured_costs(costs: tuple[float, float, float, float], accept: float) -> None:
    """Two cores of a CPU, where a chain's step is cheaper than a tree's, and one H200."""
    assert share_of_best(pair(*costs, 0.02, stalls=False), accept) >= 0.95


def test_the_target_hears_how_long_steps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: set[int] = set()
    monkeypatch.setattr(Observer, "on_step", lambda _self, step_ns: heard.add(step_ns))
    step = Duration((1_000_000,))
    costs = Costs(passes={0: Duration((5_000_000,))}, draft_token=step, rollback=Duration((200_000,)))
    answers = drawn_answers(0.5, num_answers=1, num_tokens=60, seed=0)
    Simulator(costs=costs, answers=answers, max_candidates=7).run(DecodingConfig(policy="chain"))
    assert heard == {1_000_000}


# Beside what it has to find by itself


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


def branching_pair(c: float, row_share: float) -> Simulator:
    """A pass takes `c` draft steps and eight rows; a node more makes a step longer by `row_share`."""
    machine = simulator(0.8, costs(c, spread=0.05, tree_row_ns=round(row_share * 1e6)), num_answers=12, num_tokens=96)
    return replace(machine, accept_next=0.4, max_candidates=7)


@pytest.mark.parametrize(("c", "row_share", "block", "least"), [(20, 0.06, 7, 1.2), (7, 0.0, 5, 1.48)])
def test_auto_is_well_ahead_of_the_best_block_where_the_draft_is_right_four_times_in_five(
    c: float, row_share: float, block: int, least: float
) -> None:
    """With eight nodes a step at most, it is 1.19 and 1.46 times as fast here."""
    machine = branching_pair(c, row_share)
    assert speedup(machine, AUTO) > least * speedup(machine, synchronous(block))
