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
"""Nanoseconds."""


class Side:
    """One process's view of time."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self.name = name
        self.offset_ns = 0
        """How far its clock has jumped."""
        self.ahead_ns = 0
        """How long the action that is being simulated has taken so far."""

    @property
    def ns(self) -> int:
        """What its clock shows."""
        return self._world.now_ns + self.ahead_ns + self.offset_ns


class World:
    """What happens when. Events of the same time happen in the order in which they were planned."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_ns = 0
        self.counts: Counter[str] = Counter()
        """What has happened, by name."""
        self.target = Side(self, "target")
        self.draft = Side(self, "draft")
        self.acting = self.target
        """Whose code runs: time passes as its clock shows it."""
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._num_events = 0
        self._log: list[str] = []

    def note(self, what: str) -> None:
        """A line of the event log."""
        self._log.append(f"{self.now_ns} {what}\n")

    def happened(self, what: str) -> None:
        """Count it, and note it."""
        self.counts[what] += 1
        self.note(what)

    def time_ns(self) -> int:
        """What the clock of the acting side shows, in nanoseconds."""
        return self.acting.ns

    @property
    def log(self) -> str:
        """All that happened."""
        return "".join(self._log)

    def chance(self, probability: float) -> bool:
        """Whether something that is this likely happens."""
        return self.random.random() < probability

    def between(self, low_ms: float, high_ms: float) -> int:
        """A time span: nanoseconds."""
        return int(self.random.uniform(low_ms, high_ms) * MS)

    def plan(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Have `action` happen so long after what is being done now."""
        self._num_events += 1
        heapq.heappush(self._events, (self.now_ns + self.acting.ahead_ns + delay_ns, self._num_events, action))

    def advance(self, duration_ns: int) -> None:
        """Let so much time pass, with all that happens in it."""
        end_ns = self.now_ns + duration_ns
        while self.next_event_within(end_ns):
            pass

    def next_event_within(self, end_ns: int) -> bool:
        """Let the next event happen; False where none does before `end_ns`, which it is then."""
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
        patches.append(patch("amusd.runtime.draft_restart.secrets", SimpleNamespace(randbits=nonces)))
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in reversed(patches):
                each.stop()


def _never(seconds: float) -> None:
    raise AssertionError("no worker sleeps")
