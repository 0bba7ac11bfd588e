"""Messages are matched without guessing, and times of two hosts are not compared."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tracing.runs import made

from amusd.tracing.messages import match_messages


@given(data=st.data(), num_sent=st.integers(0, 12))
def test_lost_messages_do_not_shift_the_others(data: st.DataObject, num_sent: int) -> None:
    sent = [made("send", n, n, 1, message="candidate", start=n) for n in range(num_sent)]
    arrived = [event for event in sent if data.draw(st.booleans())]
    received = [made("receive", e.start_ns + 50, e.end_ns + 50, 1, **e.fields, reception="taken") for e in arrived]
    assert [one for one, _ in match_messages(sent, received)] == arrived
