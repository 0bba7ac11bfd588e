from __future__ import annotations

import pytest

from amusd.commands.bench.timing import WARM_UP_ROUNDS, median_ratio, medians, time_in_turns


def test_the_pieces_take_turns_and_the_warm_up_is_not_counted() -> None:
    order: list[str] = []
    steps: list[tuple[int, int]] = []
    times = time_in_turns(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3, lambda *step: steps.append(step)
    )
    rounds = WARM_UP_ROUNDS + 3
    assert order == ["a", "b"] * rounds
    assert steps == [(number, rounds) for number in range(rounds)]
    assert [len(values) for values in times.values()] == [3, 3]
    assert all(value >= 0 for values in times.values() for value in values)


def test_a_ratio_is_taken_round_by_round() -> None:
    # The second round ran on a machine twice as slow: the ratio of the two does not see it.
    assert median_ratio([2.0, 4.0, 2.0], [1.0, 2.0, 1.0]) == pytest.approx(2.0)
    assert medians({"x": [3.0, 1.0, 2.0]}) == {"x": 2.0}
