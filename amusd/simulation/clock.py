"""Virtual time for the two real workers, their link and their recorders.

Times are whole nanoseconds, so that runs repeat exactly. The target is the main program; whenever its time passes, the
draft works until it has caught up. At equal times the draft acts first.

The draft acts up to the time for which the target's messages are known. Beyond it `NotYet` is raised before any change,
and the act begins again later.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from amusd.clock import Clock
from amusd.protocol.messages import Message
from amusd.simulation.cost import Duration
from amusd.transport.base import Link


class NotYet(Exception):  # noqa: N818 - nothing is wrong
    """The draft's next message is not known before the target has gone on."""


@dataclass
class Direction:
    """One direction of a link. Messages arrive in order, each `delay` after sending, or with its predecessor."""

    delay: Duration
    random: Random
    _on_their_way: deque[tuple[int, Message]] = field(default_factory=deque)
    _last_ns: int = 0

    @property
    def next_ns(self) -> float:
        """Arrival time of the next message; infinite if none is on its way."""
        return self._on_their_way[0][0] if self._on_their_way else math.inf

    def send(self, now_ns: int, message: Message) -> None:
        """Put a message on its way; costs the sender no time."""
        self._last_ns = max(now_ns + self.delay.draw(self.random), self._last_ns)
        self._on_their_way.append((self._last_ns, message))

    def take(self, now_ns: int) -> Message | None:
        """Return the next message that has arrived by now."""
        return self._on_their_way.popleft()[1] if self.next_ns <= now_ns else None


@dataclass
class WorkerClock(Clock):
    """The time of one of the workers."""

    read: Callable[[], int]

    def now_ns(self) -> int:
        """Nanoseconds since the simulation began."""
        return self.read()


@dataclass
class SimulatedLink(Link):
    """One end of a link in virtual time, which is never lost."""

    clock: Clock
    outgoing: Direction
    take: Callable[[float], Message | None]

    def send(self, message: Message) -> None:
        """See `Link`. Costs no time."""
        self.outgoing.send(self.clock.now_ns(), message)

    def receive(self, timeout: float) -> Message | None:
        """See `Link`."""
        return self.take(timeout)

    def close(self) -> None:
        """See `Link`."""


@dataclass
class VirtualTime:
    """The times of the two workers, and the link between them."""

    to_draft: Direction
    to_target: Direction
    draft_acts: deque[Callable[[], None]] = field(default_factory=deque)
    """The draft's acts in turn: `DraftWorker.take_in`, `propose`; empty: no draft."""
    target_ns: int = 0
    draft_ns: int = 0
    target_works: bool = False
    """Whether the target computes at the draft's time."""
    _known_until_ns: int = 0
    _target_waits: bool = False

    def __post_init__(self) -> None:
        self.target_clock, self.draft_clock = WorkerClock(lambda: self.target_ns), WorkerClock(lambda: self.draft_ns)
        self.target_link = SimulatedLink(self.target_clock, self.to_draft, self.receive_at_target)
        self.draft_link = SimulatedLink(self.draft_clock, self.to_target, self.receive_at_draft)

    @property
    def draft_works(self) -> bool:
        """Whether the draft computes at the target's time."""
        return self.draft_ns > self.target_ns

    def compute(self, ns: int) -> None:
        """Have the target compute."""
        self.target_works = True
        self.let_pass(ns)
        self.target_works = False

    def let_pass(self, ns: int) -> None:
        """Have the target's time pass."""
        if ns:
            self._run_draft(self.target_ns + ns)
            self.target_ns += ns

    def receive_at_target(self, timeout: float) -> Message | None:
        """The target's next message, or None after `timeout` seconds."""
        message = self.to_target.take(self.target_ns)
        if message is None and timeout > 0:
            deadline_ns = self.target_ns + math.ceil(timeout * 1e9)
            self._run_draft(deadline_ns, target_waits=True)
            self.target_ns = int(min(deadline_ns, self.to_target.next_ns))
            message = self.to_target.take(self.target_ns)
        return message

    def receive_at_draft(self, timeout: float) -> Message | None:
        """The draft's next message, or None after `timeout` seconds. Raises `NotYet`."""
        message = self.to_draft.take(self.draft_ns)
        if message is None:
            until_ns = int(min(self.draft_ns + round(timeout * 1e9), self.to_draft.next_ns))
            if until_ns > self._known_ns:
                raise NotYet
            self.draft_ns = until_ns
            message = self.to_draft.take(until_ns)
        return message

    def finish(self) -> None:
        """Have the draft receive all messages on their way."""
        while self.to_draft.next_ns < math.inf:
            self._run_draft(max(int(self.to_draft.next_ns), self.draft_ns))

    @property
    def _known_ns(self) -> float:
        return min(self._known_until_ns, self.to_target.next_ns) if self._target_waits else self._known_until_ns

    def _run_draft(self, until_ns: int, *, target_waits: bool = False) -> None:
        self._known_until_ns, self._target_waits = until_ns, target_waits
        with suppress(NotYet):
            while self.draft_acts and self.draft_ns <= self._known_ns:
                self.draft_acts[0]()
                self.draft_acts.rotate(-1)
