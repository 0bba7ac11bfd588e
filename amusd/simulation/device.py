"""What the sequences of a batch share: a device that does one thing at a time, but that for several of them together.

Joint work takes in everybody of a group who has asked by the time it begins; groups take turns. What a sequence needs
for itself (a prefill, a rollback) comes first, one after another, so that nobody is left out of the next joint work for
it.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Generic, Protocol, TypeVar

from amusd.simulation.clock import BEGINNING, PARKED, Parked, Process, VirtualClock, Worker


class Timed(Protocol):
    """What joint work comes to."""

    @property
    def ns(self) -> int:
        """How long it takes."""
        ...


Part = TypeVar("Part")
Joint = TypeVar("Joint", bound=Timed)


class Device(Generic[Part, Joint]):
    """Of one role."""

    def __init__(self, clock: VirtualClock, rank: int, price: Callable[[Sequence[Part]], Joint]) -> None:
        """`rank`: of its workers; `price`: what the parts that are there cost together."""
        self._clock = clock
        self._rank = rank
        self._price = price
        self._alone: deque[tuple[Worker, int]] = deque()
        self._parts: list[tuple[object, Worker, Part]] = []
        self._done: Joint
        self._running = False
        self._called = False

    @property
    def works(self) -> bool:
        """At work, or about to be."""
        return self._running or bool(self._alone or self._parts)

    def alone(self, worker: Worker, ns: int) -> Process:
        """Work for one sequence; what takes no time does not wait either."""
        if ns:
            self._alone.append((worker, ns))
            self._call()
            yield PARKED

    def together(self, worker: Worker, part: Part, group: object = None) -> Generator[Parked, None, Joint]:
        """Take part in the next joint work of `group`; returns when that is done."""
        self._parts.append((group, worker, part))
        self._call()
        yield PARKED
        return self._done

    def _call(self) -> None:
        """Begin as soon as everybody has done what they do at this time."""
        if not (self._running or self._called):
            self._called = True
            self._clock.schedule(self._clock.now_ns, BEGINNING, self._begin)

    def _begin(self) -> None:
        self._called = False
        if self._alone:
            worker, ns = self._alone.popleft()
            self._run(ns, [worker])
        else:
            turn = self._parts[0][0]
            taken = [(worker, part) for group, worker, part in self._parts if group is turn]
            self._parts = [waiting for waiting in self._parts if waiting[0] is not turn]
            self._done = self._price([part for _, part in taken])
            self._run(self._done.ns, [worker for worker, _ in taken])

    def _run(self, ns: int, workers: Sequence[Worker]) -> None:
        self._running = True
        self._clock.schedule(self._clock.now_ns + ns, self._rank, functools.partial(self._end, workers))

    def _end(self, workers: Sequence[Worker]) -> None:
        self._running = False
        for worker in workers:
            worker.resume()
        if self._alone or self._parts:
            self._call()
