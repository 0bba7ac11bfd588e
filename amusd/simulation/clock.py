"""A virtual clock, and what lives by it: workers that are busy or listen, links between them, their recorders.

Times are whole nanoseconds, so that runs repeat exactly. At equal times messages arrive first, then the draft goes on,
then the target: what was sent in time is seen. Joint work begins last.
"""

from __future__ import annotations

import functools
import heapq
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

from amusd.errors import InvariantError
from amusd.protocol.messages import Message
from amusd.simulation.cost import Duration
from amusd.tracing.messages import record_message
from amusd.tracing.recorder import NO_SEQUENCE, Recorder
from amusd.types import Role

ARRIVAL, DRAFT, TARGET, BEGINNING = range(4)
"""Ranks: who comes first at equal times."""


@dataclass(frozen=True, slots=True)
class Busy:
    """At work for this long; messages that arrive meanwhile wait."""

    ns: int


@dataclass(frozen=True, slots=True)
class Listen:
    """Idle until a message is there, or for this long; None: for as long as it takes."""

    ns: int | None


@dataclass(frozen=True, slots=True)
class Parked:
    """Until somebody else has it go on; messages that arrive meanwhile wait."""


PARKED = Parked()

Spent: TypeAlias = Busy | Listen | Parked

Process: TypeAlias = Generator[Spent, None, None]
"""What a worker does, as a generator that yields how it spends its time."""


class VirtualClock:
    """A queue of what is to happen when."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._queue: list[tuple[int, int, int, Callable[[], None]]] = []
        self._num_scheduled = 0

    def schedule(self, time_ns: int, rank: int, action: Callable[[], None]) -> None:
        """Have `action` called at `time_ns`; equal times go by rank, then in the order of scheduling."""
        self._num_scheduled += 1
        heapq.heappush(self._queue, (time_ns, rank, self._num_scheduled, action))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._queue:
            self.now_ns, _, _, action = heapq.heappop(self._queue)
            action()


class Worker:
    """Runs one process on the clock, and keeps the messages that have arrived for it."""

    def __init__(self, clock: VirtualClock, rank: int) -> None:
        self.mailbox: deque[Message] = deque()
        self._clock = clock
        self._rank = rank
        self._process: Process | None = None
        self._listening = False
        self._num_wakes = 0

    def start(self, process: Process) -> None:
        """Begin now."""
        self._process = process
        self._wake_at(self._clock.now_ns)

    def deliver(self, message: Message) -> None:
        """A message arrives."""
        self.mailbox.append(message)
        self.wake()

    def wake(self) -> None:
        """Have it stop listening, as though a message had come."""
        if self._listening:
            self._listening = False
            self._wake_at(self._clock.now_ns)

    def resume(self) -> None:
        """Have it go on where it is parked."""
        self._resume(self._num_wakes)

    def check_ended(self) -> None:
        """Raise `InvariantError` when the process still waits although nothing can happen any more."""
        if self._process is not None:
            raise InvariantError("a simulated worker waits for a message that nobody sends")

    def _wake_at(self, time_ns: int) -> None:
        self._num_wakes += 1
        self._clock.schedule(time_ns, self._rank, functools.partial(self._resume, self._num_wakes))

    def _resume(self, wake: int) -> None:
        """Go on until the process spends time again. A wake-up that a message has overtaken does nothing."""
        if wake != self._num_wakes or self._process is None:
            return
        self._listening = False
        for spent in self._process:
            if isinstance(spent, Busy):
                if spent.ns:
                    self._wake_at(self._clock.now_ns + spent.ns)
                    return
            elif isinstance(spent, Parked):
                return
            elif not self.mailbox:
                self._listening = True
                if spent.ns is None:
                    self._num_wakes += 1
                else:
                    self._wake_at(self._clock.now_ns + spent.ns)
                return
        self._process = None


class Link:
    """Messages arrive whole and in order, each `delay` after it was sent but never before the one ahead of it."""

    def __init__(self, clock: VirtualClock, receiver: Worker, delay: Duration, random: Random) -> None:
        self._clock = clock
        self._receiver = receiver
        self._delay = delay
        self._random = random
        self._last_arrival_ns = 0

    def send(self, message: Message) -> None:
        """Put it on its way; costs the sender no time."""
        arrival_ns = max(self._clock.now_ns + self._delay.draw(self._random), self._last_arrival_ns)
        self._last_arrival_ns = arrival_ns
        self._clock.schedule(arrival_ns, ARRIVAL, functools.partial(self._receiver.deliver, message))


class Journal(Recorder):
    """The recorder of one simulated worker: on the virtual clock, and forgetful where nobody wants the events."""

    def __init__(self, role: Role, clock: VirtualClock, *, keep: bool, path: Path | None = None) -> None:
        self._keep = False  # what the recorder itself says of this process is not part of a simulation
        super().__init__(role.value, path, lambda: clock.now_ns)
        self._keep = keep
        self.instant("worker", NO_SEQUENCE, host="simulated", pid=0)

    def span(self, name: str, start_ns: int, end_ns: int, sequence_id: int, **fields: Any) -> None:
        """Record something that took time."""
        if self._keep:
            super().span(name, start_ns, end_ns, sequence_id, **fields)

    def mark(self, name: str, sequence_id: int, fields: dict[str, Any]) -> None:
        """Record something that happened now."""
        self.span(name, self.now_ns(), self.now_ns(), sequence_id, **fields)

    def message(self, name: str, message: Message, **received: Any) -> None:
        """Record that a message is sent, or has been received and what became of it."""
        if self._keep:
            record_message(self, name, message, **received)
