"""Times and outcomes that a simulation is given."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amusd.simulation.cost import Costs, Duration, Shared
from amusd.simulation.tokens import (
    drawn_answers,
    guess_places,
    guess_weights,
)

rates = st.floats(0, 1)


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
    costs = replace(costs, sequence_ns=50, draft_sequence_ns=7)

    def taken(costs: Costs, number: int, num_sequences: int) -> tuple[int, int, int]:
        """A pass over so many candidates, a step of two tokens, a step over so many nodes."""
        pass_ns = costs.pass_ns(number, False, Random(0), num_sequences=num_sequences)
        step_ns = costs.step_ns(2, False, Random(0), num_sequences=num_sequences)
        return pass_ns, step_ns, costs.tree_step_ns(number, False, Random(0), num_sequences=num_sequences)

    assert taken(costs, 9, 1) == (1090, 200, 140)
    assert taken(costs, 9, 4) == (1120 + 150, 230 + 42, 140 + 21)
    # from four rows on, each costs a quarter of what four do; the caches are read all the same
    bent = replace(costs, knee_rows=4)
    assert taken(bent, 4, 4) == (2060 + 150, 2 * 115 + 42, 115 + 21)
    assert taken(bent, 10, 8)[1:] == (2 * 230 + 98, round(2.5 * 115) + 49)


@given(rates, st.integers(1, 5), st.integers(1, 60), st.integers(0, 5))
def test_the_given_share_of_tokens_is_right(accept: float, num_answers: int, num_tokens: int, seed: int) -> None:
    answers = drawn_answers(accept, num_answers=num_answers, num_tokens=num_tokens, seed=seed)
    assert [len(answer) for answer in answers] == [num_tokens] * num_answers
    assert sum(map(sum, answers)) == round(accept * num_tokens * num_answers)
    assert all(abs(sum(answer) - accept * num_tokens) <= 1 for answer in answers)


def test_each_further_guess_is_right_as_often_as_it_is_told_to_be() -> None:
    answer = (False,) * 4000 + (True,) * 10
    places = guess_places(answer, 0.4, 4, "s")
    expected = [0.0, 0.4, 0.24, 0.144, 0.216]  # none of them: 0.6 ** 3
    weights = guess_weights(0.0, 0.4, 4)
    assert [places[:4000].count(place) / 4000 for place in range(5)] == pytest.approx(expected, abs=0.001)
    assert weights == pytest.approx(expected[:4])
    assert set(places[4000:]) == {0}
