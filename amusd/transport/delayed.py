"""A link with added delay, as between racks or regions.

A message is handed over `delay_seconds` after its sender's stamp, so both ends must be on one machine, whose processes
share a monotonic clock.
"""

from __future__ import annotations

import time

from amusd.protocol.messages import Message
from amusd.transport.base import Transport


class DelayedTransport:
    """A `Transport` around one end of any link, which delays what it receives; wrap both ends."""

    def __init__(self, link: Transport, delay_seconds: float) -> None:
        self.address = link.address
        self.frames = link.frames
        self.send, self.has_room, self.close = link.send, link.has_room, link.close
        self._link = link
        self._delay_ns = round(delay_seconds * 1e9)
        self._next: Message | None = None
        """The message that was sent at `frames.sent_ns`; later ones are due later, and wait in the link."""

    def receive(self, timeout: float) -> Message | None:
        """The next message that is due, or None after `timeout` seconds. Raises PeerLostError."""
        deadline_ns = time.monotonic_ns() + round(timeout * 1e9)
        self._next = self._next or self._link.receive(timeout)
        if self._next is None:
            return None
        due_ns = self.frames.sent_ns + self._delay_ns
        time.sleep(max(0, min(due_ns, deadline_ns) - time.monotonic_ns()) / 1e9)
        if due_ns > deadline_ns:
            return None
        message, self._next = self._next, None
        return message
