"""How long a target may wait for a draft that says nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from amusd.policies.silence import Silence

LIMIT = 0.3
WAITS = st.lists(st.floats(0.001, 0.2), max_size=12)


@given(before=WAITS, after=WAITS)
def test_waits_add_up_from_the_last_word_on(before: list[float], after: list[float]) -> None:
    silence = Silence()
    for seconds in before:
        silence.waited(seconds)
    silence.heard()
    waited = 0.0
    for wanted in after:  # as the target does: never longer than may be
        seconds = min(wanted, silence.seconds_left(LIMIT))
        silence.waited(seconds)
        waited += seconds
    assert waited <= LIMIT + 1e-9
    assert (silence.seconds_left(LIMIT) < 1e-9) == (sum(after) > LIMIT - 1e-9)
    silence.heard()
    assert silence.seconds_left(LIMIT) == LIMIT
