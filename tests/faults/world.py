"""Virtual time: planned events in order, and a clock for each side. One seed decides everything."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable

from amusd.clock import Clock

MS = 1_000_000


class Side(Clock):
    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self.name = name
        self.offset_ns = 0
        self.ahead_ns = 0

    @property
    def ns(self) -> int:
        return self._world.now_ns + self.ahead_ns + self.offset_ns

    def now_ns(self) -> int:
        return self.ns


class ActingClock(Clock):
    def __init__(self, world: World) -> None:
        self._world = world

    def now_ns(self) -> int:
        return self._world.acting.ns

    def sleep(self, seconds: float) -> None:
        raise AssertionError("no worker sleeps")


class World:
    """The plan of all events. Events of the same time happen in the order in which they were planned."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_ns = 0
        self.counts: Counter[str] = Counter()
        self.target = Side(self, "target")
        self.draft = Side(self, "draft")
        self.acting = self.target
        self.clock = ActingClock(self)
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._num_events = 0
        self._log: list[str] = []

    def note(self, what: str) -> None:
        self._log.append(f"{self.now_ns} {what}\n")

    def happened(self, what: str) -> None:
        self.counts[what] += 1
        self.note(what)

    @property
    def log(self) -> str:
        return "".join(self._log)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def between(self, low_ms: float, high_ms: float) -> int:
        return int(self.random.uniform(low_ms, high_ms) * MS)

    def plan(self, delay_ns: int, action: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self.now_ns + self.acting.ahead_ns + delay_ns, self._num_events, action))

    def advance(self, duration_ns: int) -> None:
        end_ns = self.now_ns + duration_ns
        while self.next_event_within(end_ns):
            pass

    def next_event_within(self, end_ns: int) -> bool:
        if not self._events or self._events[0][0] > end_ns:
            self.now_ns = end_ns
            return False
        at_ns, _, action = heapq.heappop(self._events)
        self.now_ns = max(self.now_ns, at_ns)
        action()
        return True
