"""A link with added delay, as between racks or regions.

A message is handed over `delay_seconds` after its sender's stamp, so both ends must be on one machine, whose processes
share a monotonic clock.
"""

from __future__ import annotations

import time
from collections import deque

from amusd.errors import PeerLostError
from amusd.protocol.messages import Message
from amusd.transport.base import Transport


class DelayedTransport:
    """A `Transport` around one end of any link, which delays what it receives; wrap both ends."""

    def __init__(self, link: Transport, delay_seconds: float) -> None:
        self.address = link.address
        self.frames = link.frames
        self._link = link
        self._delay_ns = round(delay_seconds * 1e9)
        self._held: deque[tuple[int, Message]] = deque()
        self._loss: PeerLostError | None = None

    def send(self, message: Message) -> None:
        """Queue a message. Raises PeerLostError."""
        self._link.send(message)

    def has_room(self, num_bytes: int) -> bool:
        """See `Transport`."""
        return self._link.has_room(num_bytes)

    def receive(self, timeout: float) -> Message | None:
        """The next message that is due, or None after `timeout` seconds. Raises PeerLostError."""
        deadline_ns = time.monotonic_ns() + round(timeout * 1e9)
        while True:
            while self._take_in(0.0):
                pass
            now_ns = time.monotonic_ns()
            if self._held and self._held[0][0] <= now_ns:
                return self._held.popleft()[1]
            if self._loss is not None and not self._held:
                raise self._loss
            if now_ns >= deadline_ns:
                return None
            wake_ns = min(deadline_ns, self._held[0][0]) if self._held else deadline_ns
            if self._loss is None:
                self._take_in((wake_ns - now_ns) / 1e9)  # ends when a message comes, which may be due before
            else:
                time.sleep((wake_ns - now_ns) / 1e9)

    def close(self) -> None:
        """Release everything. Idempotent; never raises."""
        self._held.clear()
        self._link.close()

    def _take_in(self, timeout: float) -> bool:
        """Hold the link's next message. A loss is reported once the last message was handed over."""
        if self._loss is not None:
            return False
        try:
            message = self._link.receive(timeout)
        except PeerLostError as error:
            self._loss = error
            return False
        if message is not None:
            self._held.append((self._link.frames.sent_ns + self._delay_ns, message))
        return message is not None
