"""Virtual time: what is going to happen, in order, and a clock for each side. One seed decides everything."""

from __future__ import annotations

import heapq
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

MS = 1_000_000


class Side:
    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self.name = name
        self.offset_ns = 0
        self.ahead_ns = 0

    @property
    def ns(self) -> int:
        return self._world.now_ns + self.ahead_ns + self.offset_ns


class World:
    """What happens when. Events of the same time happen in the order in which they were planned."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_ns = 0
        self.counts: Counter[str] = Counter()
        self.target = Side(self, "target")
        self.draft = Side(self, "draft")
        self.acting = self.target
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._num_events = 0
        self._log: list[str] = []

    def note(self, what: str) -> None:
        self._log.append(f"{self.now_ns} {what}\n")

    def happened(self, what: str) -> None:
        self.counts[what] += 1
        self.note(what)

    def time_ns(self) -> int:
        return self.acting.ns

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

    @contextmanager
    def time(self, nonces: Callable[[int], int]) -> Iterator[None]:
        """All of amusd lives in this world: it reads no other clock, and draws its nonces from `nonces`."""
        clock = SimpleNamespace(
            monotonic=lambda: self.acting.ns / 1e9, monotonic_ns=lambda: self.acting.ns, sleep=_never
        )
        modules = [module for name, module in list(sys.modules.items()) if name.startswith("amusd.")]
        patches = [patch.object(module, "time", clock) for module in modules if vars(module).get("time") is time]
        patches.append(patch("amusd.runtime.connection.secrets", SimpleNamespace(randbits=nonces)))
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in reversed(patches):
                each.stop()


def _never(seconds: float) -> None:
    raise AssertionError("no worker sleeps")
