"""Times and outcomes that a simulation is given."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from amusd.simulation.cost import Costs, Duration
from amusd.simulation.tokens import drawn_answers

rates = st.floats(0, 1)


def test_sequences_share_the_fixed_part_of_a_pass_and_of_a_step() -> None:
    passes = {number: Duration((1000 + 10 * number,)) for number in range(20)}
    costs = Costs(passes=passes, draft_token=Duration((100,)), tree_row_ns=5)
    costs = replace(costs, sequence_ns=50, draft_sequence_ns=7)

    def taken(costs: Costs, number: int, num_sequences: int) -> tuple[int, int, int]:
        """A pass over so many candidates, a step of a token each, a step over so many nodes."""
        pass_ns = costs.pass_ns(number, False, Random(0), num_sequences=num_sequences)
        step_ns = costs.step_ns(False, Random(0), num_sequences=num_sequences)
        return pass_ns, step_ns, costs.tree_step_ns(number, False, Random(0), num_sequences=num_sequences)

    assert taken(costs, 9, 1) == (1090, 100, 140)
    assert taken(costs, 9, 4) == (1120 + 150, 115 + 21, 140 + 21)
    # from four rows on, each costs a quarter of what four do; the caches are read all the same
    bent = replace(costs, knee_rows=4)
    assert taken(bent, 4, 4) == (2060 + 150, 115 + 21, 115 + 21)
    assert taken(bent, 10, 8)[1:] == (230 + 49, round(2.5 * 115) + 49)


@given(rates, st.integers(1, 5), st.integers(1, 60), st.integers(0, 5))
def test_the_given_share_of_tokens_is_right(accept: float, num_answers: int, num_tokens: int, seed: int) -> None:
    answers = drawn_answers(accept, num_answers=num_answers, num_tokens=num_tokens, seed=seed)
    assert [len(answer) for answer in answers] == [num_tokens] * num_answers
    assert sum(map(sum, answers)) == round(accept * num_tokens * num_answers)
    assert all(abs(sum(answer) - accept * num_tokens) <= 1 for answer in answers)
