"""A delay is counted from the sending, whenever somebody looks."""

from __future__ import annotations

import time

import pytest

from amusd.errors import PeerLostError
from amusd.protocol.messages import Shutdown, Verdict
from amusd.transport.delayed import DelayedTransport
from amusd.transport.memory import MemoryTransport, memory_pair

DELAY_SECONDS = 0.2


@pytest.fixture
def ends() -> tuple[MemoryTransport, DelayedTransport]:
    sender, receiver = memory_pair()
    return sender, DelayedTransport(receiver, DELAY_SECONDS)


def numbered(number: int) -> Verdict:
    return Verdict(number, 1, 0, 0, (number,), 0)


def test_a_message_comes_when_it_is_due_and_not_before(ends: tuple[MemoryTransport, DelayedTransport]) -> None:
    sender, receiver = ends
    before_ns = time.monotonic_ns()
    sender.send(Shutdown())
    assert receiver.receive(0.0) is None
    assert receiver.receive(20.0) == Shutdown()
    assert time.monotonic_ns() - before_ns >= DELAY_SECONDS * 1e9
    assert before_ns <= receiver.sent_ns <= time.monotonic_ns() - DELAY_SECONDS * 1e9


def test_time_that_passes_before_anybody_looks_counts(ends: tuple[MemoryTransport, DelayedTransport]) -> None:
    sender, receiver = ends
    for number in range(3):
        sender.send(numbered(number))
    time.sleep(DELAY_SECONDS + 0.01)
    assert [receiver.receive(0.0) for _ in range(4)] == [numbered(0), numbered(1), numbered(2), None]


def test_what_a_lost_peer_sent_still_comes_in_time(ends: tuple[MemoryTransport, DelayedTransport]) -> None:
    sender, receiver = ends
    sender.send(numbered(1))
    sender.kill()
    assert receiver.receive(0.0) is None
    assert receiver.receive(20.0) == numbered(1)
    with pytest.raises(PeerLostError):
        receiver.receive(20.0)


def test_a_timeout_is_kept_while_a_message_is_held(ends: tuple[MemoryTransport, DelayedTransport]) -> None:
    sender, receiver = ends
    sender.send(Shutdown())
    started = time.monotonic()
    assert receiver.receive(0.01) is None
    assert 0.01 <= time.monotonic() - started < DELAY_SECONDS
