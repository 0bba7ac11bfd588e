"""What a simulated link promises."""

from __future__ import annotations

import math
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from amusd.protocol.messages import Message, Shutdown
from amusd.simulation.clock import Direction
from amusd.simulation.cost import Duration


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.lists(st.integers(0, 100), min_size=1, max_size=5))
def test_a_link_keeps_the_order_and_the_least_delay(pauses: list[int], delays: list[int]) -> None:
    link, now_ns, sent = Direction(Duration(tuple(delays)), Random(1)), 0, []
    messages: list[Message] = [Shutdown() for _ in pauses]
    for pause, message in zip(pauses, messages, strict=True):
        now_ns += pause
        sent.append(now_ns)
        link.send(now_ns, message)
    arrived = []
    while link.next_ns < math.inf:
        arrived.append(int(link.next_ns))
        assert link.take(arrived[-1] - 1) is None
        assert link.take(arrived[-1]) is messages[len(arrived) - 1]
    assert arrived == sorted(arrived)
    for sent_ns, time_ns in zip(sent, arrived, strict=True):
        assert sent_ns + min(delays) <= time_ns <= sent_ns + max(delays)
