"""When a draft waits for a verdict: only for one that its next step would run into, and never for long."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import assume, given
from hypothesis import strategies as st

from amusd.policies.estimates import DEVIATIONS, FORESEEN_MEMORY, VerdictClock

MS = 1_000_000
durations = st.integers(1, 10**9)


def clock(passes: Sequence[int], step: int, start: int = 0) -> tuple[VerdictClock, int]:
    """One that has heard verdicts after these passes, each begun at once; and the time of the last one.

    Before them it has heard 200 that nobody foresaw: what it does for their sake is what most tests are about.
    """
    found, now = VerdictClock(), start
    for _ in range(200):
        found.heard(now, goes_on=False)
    found.stepped(step)
    found.heard(now, goes_on=True)
    for each in passes:
        now += each
        found.heard(now, goes_on=True)
    return found, now


@given(length=durations, step=durations, elapsed=durations, start=durations)
def test_passes_of_equal_length_are_waited_for_if_and_only_if_a_step_that_does_not_fit_does_not_pay(
    length: int, step: int, elapsed: int, start: int
) -> None:
    found, now = clock([length] * 3, step, start)
    due = now + length
    foreseen = 1 - FORESEEN_MEMORY**4 * (1 - 0.5 * FORESEEN_MEMORY**200)
    before, behind = due - (now + elapsed), now + elapsed + step - due
    expected = before if before > 0 and behind > 0 and foreseen * before < (1 - foreseen) * behind else 0
    assume(abs(foreseen * before - (1 - foreseen) * behind) > 1e-6 * (length + step + start))
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
    assert even.patience_ns(now + 11 * MS) == 0  # it is late: nobody knows when it comes
    uneven, now = clock([10 * MS, 14 * MS, 10 * MS, 14 * MS, 10 * MS], 5 * MS)
    assert uneven.patience_ns(now + 8 * MS) > 4 * MS
    assert uneven.patience_ns(now + 12 * MS) > 0


def test_a_target_that_waits_for_candidates_begins_its_pass_when_they_are_sent() -> None:
    assert VerdictClock().patience_ns(0) == 0
    found, now = clock([10 * MS], 5 * MS)
    found.heard(now + 10 * MS, goes_on=False)
    now += 10 * MS
    assert found.patience_ns(now + 9 * MS) == 0  # no pass is under way
    found.sent(now + 20 * MS)
    found.sent(now + 25 * MS)  # more for the same pass
    assert found.patience_ns(now + 28 * MS) == 2 * MS
    found.heard(now + 30 * MS, goes_on=True)
    assert found.patience_ns(now + 38 * MS) == 2 * MS
