"""One direction of the link between two simulated workers."""

from __future__ import annotations

import functools
from random import Random

from amusd.protocol.messages import Message
from amusd.simulation.clock import ARRIVAL, VirtualClock, Worker
from amusd.simulation.cost import Duration


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
