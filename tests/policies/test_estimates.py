"""Estimates from passes and steps for policies: whether drafting pays, a row's cost, the time of the next verdict."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from amusd.policies.estimates import DEVIATIONS, DRAFT_ROW_SHARE, FORESEEN_MEMORY, RowCost, VerdictClock
from amusd.policies.observer import FIRST_DRAFTING, FIRST_PAUSE, LATER_DRAFTING, DraftingSwitch

# Whether drafting pays is found by trying, at little cost


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
            self.switch.on_pass(committed, seconds, seconds, is_plain=rests)
            num_tokens -= committed
            self.num_rests += rests
            self.seconds += seconds
            self.ideal_seconds += 0.01 * committed * min(1.0, self.slowdown / self.num_tokens)
        return self


def test_a_rest_is_tried_once_where_drafting_pays_and_never_where_it_pays_twice() -> None:
    pair = Pair(1.6, 1.1).decode(5000)
    assert pair.num_rests == FIRST_PAUSE
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
        switch.on_pass(1, seconds, seconds, is_plain=not pays)
    lengths = [length for _, length in phases]
    assert lengths[:4] == [FIRST_DRAFTING, FIRST_PAUSE, LATER_DRAFTING, 4 * FIRST_PAUSE]
    assert lengths[4:7] == [LATER_DRAFTING, 16 * FIRST_PAUSE, LATER_DRAFTING]


def test_a_rest_that_did_not_pay_is_not_soon_tried_again() -> None:
    """This holds even where the quickest pass would make a rest look worthwhile."""
    switch = DraftingSwitch()
    rests = []
    for number in range(4000):
        pays = switch.drafting_pays
        rests += [number] if not pays else []
        seconds = 0.01 if pays and number % 10 == 0 else 0.015
        switch.on_pass(1, 0.0151 - 0.0002 * pays, seconds, is_plain=not pays)
    starts = [number for number in rests if number - 1 not in rests]
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    assert gaps[:3] == [
        2 * FIRST_DRAFTING + FIRST_PAUSE,
        4 * FIRST_DRAFTING + FIRST_PAUSE,
        8 * FIRST_DRAFTING + FIRST_PAUSE,
    ]


@given(st.floats(1.0, 3.0), st.floats(1.0, 2.0), st.floats(0, 0.1), st.integers(0, 99))
def test_little_is_lost_whatever_the_pair(num_tokens: float, slowdown: float, spread: float, seed: int) -> None:
    pair = Pair(num_tokens, slowdown, spread, seed).decode(6000)
    assert pair.seconds < 1.1 * pair.ideal_seconds


# What a further row of a step costs


@given(st.floats(0, 1), st.lists(st.integers(1, 16), min_size=30, max_size=60, unique=False))
def test_the_share_of_a_row_is_found_whatever_the_steps(share: float, sizes: list[int]) -> None:
    cost = RowCost(DRAFT_ROW_SHARE)
    for rows in (1, 8, *sizes):
        cost.add(rows, round(1e6 * (1 + share * (rows - 1))))
    assert cost.row_share == pytest.approx(share, abs=0.001)


def test_a_price_that_nothing_confirms_is_forgotten() -> None:
    cost = RowCost()
    cost.add(1, 1_000_000)
    cost.add(8, 7_300_000)
    assert cost.row_ns == pytest.approx(900_000, rel=0.01)
    for _ in range(1000):
        cost.add(1, 1_000_000)
    assert cost.row_ns < 10_000


def test_a_row_never_costs_more_than_a_pass_over_as_many_took() -> None:
    """A delayed first pass makes rows look dear until a second pass corrects it."""
    cost = RowCost()
    cost.add(8, 976_000_000)
    cost.add(1, 40_000_000)
    assert cost.row_ns == 40_000_000
    cost.add(4, 60_000_000)
    assert cost.row_ns <= 15_000_000


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_a_step_that_was_held_up_says_nothing_of_rows(rows: int) -> None:
    """One step of 300 ms among 200 of 5 ms made rows look free or dear for 50 steps, which cost trees 5 %."""
    cost = RowCost(DRAFT_ROW_SHARE)
    for size in (1, 8, 16) * 20:
        cost.add(size, 4_000_000 + 400_000 * size)
    found = cost.row_share
    cost.add(rows, 300_000_000)
    assert cost.row_share == found == pytest.approx(1 / 11, rel=0.01)


def test_steps_that_stay_slow_are_no_stalls() -> None:
    cost = RowCost()
    for factor in (1, 20):
        for size in (1, 8) * 200:
            cost.add(size, factor * (900_000 + 100_000 * size))
    assert cost.row_ns == pytest.approx(2_000_000, rel=0.01)


# A draft waits only for a verdict that would interrupt its next step, and never for long

MS = 1_000_000
durations = st.integers(1, 10**9)


def clock(passes: Sequence[int], step: int, start: int = 0) -> tuple[VerdictClock, int]:
    """Returns a clock that has heard verdicts after these passes, each begun at once, and the time of the last one.

    Before them it has heard 200 verdicts that were not foreseen, since most tests are about their effect.
    """
    found, now = VerdictClock(), start
    for _ in range(200):
        found.on_verdict(now, goes_on=False)
    found.on_step(step)
    found.on_verdict(now, goes_on=True)
    for each in passes:
        now += each
        found.on_verdict(now, goes_on=True)
    return found, now


@given(length=durations, step=durations, elapsed=durations, start=durations)
def test_passes_of_equal_length_are_waited_for_if_and_only_if_a_step_that_does_not_fit_does_not_pay(
    length: int, step: int, elapsed: int, start: int
) -> None:
    found, now = clock([length] * 3, step, start)
    due = now + length
    foreseen = 1 - FORESEEN_MEMORY**4 * (1 - 0.5 * FORESEEN_MEMORY**200)
    before, after = due - (now + elapsed), now + elapsed + step - due
    expected = before if before > 0 and after > 0 and foreseen * before < (1 - foreseen) * after else 0
    assume(abs(foreseen * before - (1 - foreseen) * after) > 1e-6 * (length + step + start))
    assert abs(found.patience_ns(now + elapsed) - expected) <= 2 + length // 10**6


@given(passes=st.lists(durations, min_size=1, max_size=10), step=durations, elapsed=st.integers(0, 4 * 10**9))
def test_patience_is_bounded_and_ends(passes: list[int], step: int, elapsed: int) -> None:
    found, now = clock(passes, step)
    patience = found.patience_ns(now + elapsed)
    spread = max(passes) - min(passes)
    last = now + max(passes) + DEVIATIONS * spread + 1
    assert patience >= 0
    assert now + elapsed + patience <= max(last, now + elapsed)
    assert found.patience_ns(int(last) + 1) == 0
    if patience:  # having waited that long, it waits no more
        assert found.patience_ns(now + elapsed + patience + 1) == 0


def test_uneven_passes_are_waited_for_a_little_longer_than_even_ones() -> None:
    even, now = clock([10 * MS] * 6, 5 * MS)
    assert even.patience_ns(now + 8 * MS) == 2 * MS
    assert even.patience_ns(now + 4 * MS) == 0  # a step fits
    assert even.patience_ns(now + 11 * MS) == 0  # it is late, so its time is unknown
    uneven, now = clock([10 * MS, 14 * MS, 10 * MS, 14 * MS, 10 * MS], 5 * MS)
    assert uneven.patience_ns(now + 8 * MS) > 4 * MS
    assert uneven.patience_ns(now + 12 * MS) > 0


def test_a_target_that_waits_for_candidates_begins_its_pass_when_they_are_sent() -> None:
    assert VerdictClock().patience_ns(0) == 0
    found, now = clock([10 * MS], 5 * MS)
    found.on_verdict(now + 10 * MS, goes_on=False)
    now += 10 * MS
    assert found.patience_ns(now + 9 * MS) == 0  # no pass is under way
    found.on_candidates(now + 20 * MS)
    found.on_candidates(now + 25 * MS)  # more for the same pass
    assert found.patience_ns(now + 28 * MS) == 2 * MS
    found.on_verdict(now + 30 * MS, goes_on=True)
    assert found.patience_ns(now + 38 * MS) == 2 * MS
