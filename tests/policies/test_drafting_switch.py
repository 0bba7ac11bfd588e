"""Whether drafting pays: found by trying, at little cost."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amusd.policies.estimates import FIRST_LOOK, FIRST_REST, SECOND_LOOK, DraftingSwitch


class Pair:
    """Passes of 10 ms alone; with a draft they take `slowdown` times as long and commit `num_tokens` on average."""

    def __init__(self, num_tokens: float, slowdown: float, spread: float = 0.0, seed: int = 0) -> None:
        self.switch = DraftingSwitch()
        self.num_tokens, self.slowdown, self.spread = num_tokens, slowdown, spread
        self.random = random.Random(seed)
        self.seconds = self.ideal_seconds = 0.0
        self.num_rests = 0

    def decode(self, num_tokens: int) -> Pair:
        while num_tokens > 0:
            rests = not self.switch.drafting_pays
            noise = 1 + self.spread * (2 * self.random.random() - 1)
            seconds = 0.01 * noise * (1 if rests else self.slowdown)
            whole = int(self.num_tokens)
            committed = 1 if rests else whole + (self.random.random() < self.num_tokens - whole)
            self.switch.passed(committed, seconds, seconds, rests=rests)
            num_tokens -= committed
            self.num_rests += rests
            self.seconds += seconds
            self.ideal_seconds += 0.01 * committed * min(1.0, self.slowdown / self.num_tokens)
        return self


def test_a_rest_is_tried_once_where_drafting_pays_and_never_where_it_pays_twice() -> None:
    pair = Pair(1.6, 1.1).decode(5000)
    assert pair.num_rests == FIRST_REST
    assert pair.switch.plain_tokens_per_second == pytest.approx(100)
    assert Pair(2.2, 1.0).decode(5000).num_rests == 0


def test_a_rest_grows_while_it_pays() -> None:
    switch = DraftingSwitch()
    phases = [(True, 0)]
    for _ in range(500):
        pays = switch.drafting_pays
        if phases[-1][0] != pays:
            phases.append((pays, 0))
        phases[-1] = pays, phases[-1][1] + 1
        seconds = 0.012 if pays else 0.01
        switch.passed(1, seconds, seconds, rests=not pays)
    lengths = [length for _, length in phases]
    assert lengths[:4] == [FIRST_LOOK, FIRST_REST, SECOND_LOOK, 4 * FIRST_REST]
    assert lengths[4:7] == [SECOND_LOOK, 16 * FIRST_REST, SECOND_LOOK]


def test_a_rest_that_did_not_pay_is_not_soon_tried_again() -> None:
    """Even where the quickest pass would allow it."""
    switch = DraftingSwitch()
    rests = []
    for number in range(4000):
        pays = switch.drafting_pays
        rests += [number] if not pays else []
        seconds = 0.01 if pays and number % 10 == 0 else 0.015
        switch.passed(1, 0.0151 - 0.0002 * pays, seconds, rests=not pays)
    starts = [number for number in rests if number - 1 not in rests]
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    assert gaps[:3] == [2 * FIRST_LOOK + FIRST_REST, 4 * FIRST_LOOK + FIRST_REST, 8 * FIRST_LOOK + FIRST_REST]


@given(st.floats(1.0, 3.0), st.floats(1.0, 2.0), st.floats(0, 0.1), st.integers(0, 99))
def test_little_is_lost_whatever_the_pair(num_tokens: float, slowdown: float, spread: float, seed: int) -> None:
    pair = Pair(num_tokens, slowdown, spread, seed).decode(6000)
    assert pair.seconds < 1.1 * pair.ideal_seconds
