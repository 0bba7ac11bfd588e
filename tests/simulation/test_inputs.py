"""Times and outcomes that a simulation is given."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amusd.simulation.cost import Costs, Duration, Shared
from amusd.simulation.tokens import (
    drawn_answers,
    guess_places,
    guess_weights,
    replayed_answers,
    trace_rate,
)

rates = st.floats(0, 1)
traces = st.lists(st.sampled_from([True, False, None]), min_size=1, max_size=50).map(tuple)


def test_a_pass_costs_what_the_nearest_measured_width_costs() -> None:
    passes = {width: Shared(Duration((1000 * width,)), Duration((1000 * width + 1,))) for width in (1, 4, 8)}
    costs = Costs(passes=passes, draft_token=Shared.same(Duration((7,))))

    def pass_ns(num_candidates: int, draft_works: bool) -> int:
        return costs.pass_ns(num_candidates, draft_works, Random(0))

    assert [pass_ns(n, draft_works=False) for n in (0, 1, 2, 3, 4, 6, 7, 20)] == [
        1000, 1000, 1000, 4000, 4000, 4000, 8000, 8000,
    ]  # fmt: skip
    assert pass_ns(4, draft_works=True) == 4001
    assert costs.step_ns(3, target_works=True, random=Random(0)) == 21


def test_a_step_on_a_tree_costs_what_the_nearest_number_of_nodes_costs_and_the_nodes_between() -> None:
    token = Shared.same(Duration((1000,)))
    costs = Costs(passes={}, draft_token=token, tree_row_ns=10)
    assert [costs.tree_step_ns(n, target_works=True, random=Random(0)) for n in (1, 2, 8)] == [1000, 1010, 1070]
    steps = {2: Shared(Duration((500,)), Duration((600,))), 8: Shared.same(Duration((900,)))}
    costs = Costs(passes={}, draft_token=token, tree_steps=steps, tree_row_ns=10)
    assert [costs.tree_step_ns(n, target_works=True, random=Random(0)) for n in (1, 2, 4, 8, 9)] == [
        590,
        600,
        620,
        900,
        910,
    ]
    assert costs.tree_step_ns(2, target_works=False, random=Random(0)) == 500


def test_sequences_share_the_fixed_part_of_a_pass_and_of_a_step() -> None:
    passes = {number: Shared.same(Duration((1000 + 10 * number,))) for number in range(20)}
    costs = Costs(passes=passes, draft_token=Shared.same(Duration((100,))), tree_row_ns=5)

    def pass_ns(costs: Costs, num_candidates: int, num_sequences: int) -> int:
        return costs.pass_ns(num_candidates, draft_works=False, random=Random(0), num_sequences=num_sequences)

    def step_ns(costs: Costs, num_sequences: int) -> int:
        return costs.step_ns(2, target_works=False, random=Random(0), num_sequences=num_sequences)

    def tree_ns(costs: Costs, num_nodes: int, num_sequences: int) -> int:
        return costs.tree_step_ns(num_nodes, target_works=False, random=Random(0), num_sequences=num_sequences)

    assert [pass_ns(costs, 0, 1), pass_ns(costs, 0, 3), pass_ns(costs, 9, 3)] == [1000, 1020, 1110]
    assert [step_ns(costs, 1), step_ns(costs, 4)] == [200, 230]
    cached = replace(costs, sequence_ns=50, draft_sequence_ns=7)
    assert pass_ns(cached, 9, 3) == pass_ns(costs, 9, 3) + 100
    assert step_ns(cached, 4) == step_ns(costs, 4) + 2 * 3 * 7
    assert tree_ns(cached, 9, 4) == tree_ns(costs, 9, 4) + 3 * 7 == 140 + 3 * 7
    # from four rows on, each costs a quarter of what four do; the caches are read all the same
    bent = replace(cached, knee_rows=4)
    assert [pass_ns(bent, 0, 4), pass_ns(bent, 3, 1), pass_ns(bent, 6, 2)] == [1030 + 150, 1030, 2060 + 50]
    assert [step_ns(bent, 4), step_ns(bent, 8)] == [2 * 115 + 42, 2 * 230 + 98]
    assert [tree_ns(bent, 4, 2), tree_ns(bent, 10, 2)] == [115 + 7, round(2.5 * 115) + 7]


@given(rates, st.integers(1, 5), st.integers(1, 60), st.integers(0, 5))
def test_the_given_share_of_tokens_is_right(accept: float, num_answers: int, num_tokens: int, seed: int) -> None:
    answers = drawn_answers(accept, num_answers=num_answers, num_tokens=num_tokens, seed=seed)
    assert [len(answer) for answer in answers] == [num_tokens] * num_answers
    assert sum(map(sum, answers)) == round(accept * num_tokens * num_answers)
    assert all(abs(sum(answer) - accept * num_tokens) <= 1 for answer in answers)


@pytest.mark.parametrize("accept", [0.3, 0.8, 0.95])
def test_each_answer_has_runs_of_right_tokens_as_long_as_chance_makes_them(accept: float) -> None:
    for answer in drawn_answers(accept, num_answers=3, num_tokens=2000, seed=0):
        runs = [len(list(run)) for right, run in groupby(answer) if right]
        num_wrong = 2000 - sum(runs)
        for length in range(1, 6):
            expected = num_wrong * accept**length
            assert sum(run >= length for run in runs) == pytest.approx(expected, abs=2)


def test_each_further_guess_is_right_as_often_as_it_is_told_to_be() -> None:
    answer = (False,) * 4000 + (True,) * 10
    places = guess_places(answer, 0.4, 4, "s")
    expected = [0.0, 0.4, 0.24, 0.144, 0.216]  # none of them: 0.6 ** 3
    weights = guess_weights(0.0, 0.4, 4)
    assert [places[:4000].count(place) / 4000 for place in range(5)] == pytest.approx(expected, abs=0.001)
    assert weights == pytest.approx(expected[:4])
    assert set(places[4000:]) == {0}


@given(st.lists(traces, max_size=6), st.integers(0, 3))
def test_a_replay_keeps_what_is_known(found: list[tuple[bool | None, ...]], seed: int) -> None:
    usable = [trace for trace in found if trace_rate(trace) is not None]
    answers = replayed_answers(found, seed)
    assert [len(answer) for answer in answers] == [len(trace) for trace in usable]
    for trace, answer in zip(usable, answers, strict=True):
        assert all(known in (None, outcome) for known, outcome in zip(trace, answer, strict=True))
    assert answers == replayed_answers(found, seed)
