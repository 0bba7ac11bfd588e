"""Order on the virtual clock: who comes first, what wakes a worker, and what a link promises."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amusd.errors import InvariantError
from amusd.protocol.messages import Message, Shutdown
from amusd.simulation.clock import ARRIVAL, DRAFT, TARGET, Busy, Link, Listen, Process, VirtualClock, Worker
from amusd.simulation.cost import Duration


def test_at_equal_times_messages_come_first_then_the_draft_then_the_target() -> None:
    clock, seen = VirtualClock(), []
    for rank in (TARGET, DRAFT, ARRIVAL):
        clock.schedule(5, rank, lambda rank=rank: seen.append(rank))
    clock.schedule(4, TARGET, lambda: seen.append("earlier"))
    clock.run()
    assert seen == ["earlier", ARRIVAL, DRAFT, TARGET]
    assert clock.now_ns == 5


def woken(arrivals: list[int], effects: list[Busy | Listen]) -> list[int]:
    """When a worker that spends its time on `effects` goes on, with messages at `arrivals`."""
    clock = VirtualClock()
    worker, times = Worker(clock, DRAFT), []

    def process() -> Process:
        for effect in effects:
            yield effect
            times.append(clock.now_ns)
            worker.mailbox.clear()

    worker.start(process())
    for time_ns in arrivals:
        clock.schedule(time_ns, ARRIVAL, lambda: worker.deliver(Shutdown()))
    clock.run()
    return times


@pytest.mark.parametrize(
    ("arrivals", "effects", "times"),
    [
        ([], [Busy(3), Busy(4)], [3, 7]),
        ([1], [Busy(3), Busy(4)], [3, 7]),
        ([], [Listen(10)], [10]),
        ([4], [Listen(10)], [4]),
        ([4], [Listen(None)], [4]),
        ([1], [Busy(3), Listen(10), Listen(10)], [3, 13, 23]),
        ([2, 12], [Listen(10), Listen(None)], [2, 12]),
        ([2], [Listen(5), Busy(10)], [2, 12]),
        ([5], [Listen(5), Listen(5)], [5, 10]),
    ],
)
def test_work_is_not_interrupted_and_listening_is(
    arrivals: list[int], effects: list[Busy | Listen], times: list[int]
) -> None:
    assert woken(arrivals, effects) == times


def test_a_message_that_is_there_already_is_not_waited_for() -> None:
    clock = VirtualClock()
    worker, times = Worker(clock, TARGET), []

    def process() -> Process:
        yield Busy(3)
        yield Listen(None)
        times.append(clock.now_ns)

    worker.start(process())
    clock.schedule(1, ARRIVAL, lambda: worker.deliver(Shutdown()))
    clock.run()
    assert times == [3]
    worker.check_ended()


def test_waiting_for_what_nobody_sends_is_an_error() -> None:
    clock = VirtualClock()
    worker = Worker(clock, TARGET)

    def process() -> Process:
        yield Listen(None)

    worker.start(process())
    clock.run()
    with pytest.raises(InvariantError, match="nobody sends"):
        worker.check_ended()


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.lists(st.integers(0, 100), min_size=1, max_size=5))
def test_a_link_keeps_the_order_and_the_least_delay(pauses: list[int], delays: list[int]) -> None:
    clock = VirtualClock()
    receiver, sender = Worker(clock, TARGET), Worker(clock, DRAFT)
    link = Link(clock, receiver, Duration(tuple(delays)), Random(1))
    sent: list[int] = []
    arrived: list[tuple[int, Message]] = []

    def sending() -> Process:
        for pause in pauses:
            yield Busy(pause)
            sent.append(clock.now_ns)
            link.send(Shutdown())

    def receiving() -> Process:
        while len(arrived) < len(pauses):
            yield Listen(None)
            arrived.append((clock.now_ns, receiver.mailbox.popleft()))

    sender.start(sending())
    receiver.start(receiving())
    clock.run()
    receiver.check_ended()
    times = [time_ns for time_ns, _ in arrived]
    assert times == sorted(times)
    for sent_ns, time_ns in zip(sent, times, strict=True):
        assert sent_ns + min(delays) <= time_ns <= sent_ns + max(delays)
