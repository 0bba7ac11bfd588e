"""The faults that the in-process link can be given."""

from __future__ import annotations

import time

import pytest
from memory_link import memory_pair
from transport.links import DEADLINE, expect

from amusd.errors import PeerLostError
from amusd.protocol.messages import Shutdown, Verdict


def verdict(number: int) -> Verdict:
    return Verdict(number, 1, 0, 0, (), 0)


def test_what_a_killed_end_had_sent_is_still_delivered_then_it_is_lost() -> None:
    target, draft = memory_pair(seed=0, max_delay_seconds=0.01)
    for number in range(5):
        draft.send(verdict(number))
    draft.kill()
    with pytest.raises(PeerLostError, match="the peer closed"):
        target.send(Shutdown())
    assert [expect(target) for _ in range(5)] == [verdict(number) for number in range(5)]
    with pytest.raises(PeerLostError, match="the peer closed"):
        target.receive(DEADLINE)
    with pytest.raises(PeerLostError, match="this end"):
        draft.receive(DEADLINE)


def test_delays_keep_the_order_and_depend_on_the_seed_alone() -> None:
    def due_times(seed: int) -> list[float]:
        sender, _ = memory_pair(seed=seed, max_delay_seconds=1000.0)
        sender.send(Shutdown())
        first = sender._outgoing.frames[0][0] - time.monotonic()
        for _ in range(20):
            sender.send(Shutdown())
        due = [due for due, _ in sender._outgoing.frames]
        assert due == sorted(due)
        return [round(first, -1)]

    assert due_times(1) == due_times(1)
    assert len({due_times(seed)[0] for seed in range(10)}) > 1
