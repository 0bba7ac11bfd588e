"""A link with time added to it: what the same pair would do as far apart as another rack, or another region.

Every message is handed over `delay_seconds` after it was sent, whatever the link itself took of that. When it was sent
is the sender's stamp on the frame, so both ends have to be on one machine, whose processes share a monotonic clock.
"""

from __future__ import annotations

import time
from collections import deque

from amusd.errors import PeerLostError
from amusd.protocol.messages import Message
from amusd.transport.base import Listener, Transport


class DelayedTransport:
    """The receiving half of the delay, around one end of any link. A `Transport`; both ends have to be wrapped."""

    def __init__(self, link: Transport, delay_seconds: float) -> None:
        self._link = link
        self._delay_ns = round(delay_seconds * 1e9)
        self._held: deque[tuple[int, Message]] = deque()
        """(when it was sent, message), in the order of sending."""
        self._loss: PeerLostError | None = None
        self.sent_ns = 0
        """When the message that `receive` returned last was sent."""

    @property
    def num_rejected(self) -> int:
        """Frames that the link dropped."""
        return self._link.num_rejected

    def send(self, message: Message) -> None:
        """Queue a message. Raises PeerLostError."""
        self._link.send(message)

    def receive(self, timeout: float) -> Message | None:
        """The next message that is due, or None after `timeout` seconds. Raises PeerLostError."""
        deadline_ns = time.monotonic_ns() + round(timeout * 1e9)
        while True:
            self._take_in()
            now_ns = time.monotonic_ns()
            due_ns = self._held[0][0] + self._delay_ns if self._held else None
            if due_ns is not None and due_ns <= now_ns:
                self.sent_ns, message = self._held.popleft()
                return message
            if self._loss is not None and due_ns is None:
                raise self._loss
            if now_ns >= deadline_ns:
                return None
            self._sleep((deadline_ns if due_ns is None else min(deadline_ns, due_ns)) - now_ns)

    def close(self) -> None:
        """Release everything. Idempotent; never raises."""
        self._held.clear()
        self._link.close()

    def _take_in(self) -> None:
        """All that has come, without waiting."""
        while self._loss is None and self._take_one(0.0):
            pass

    def _sleep(self, duration_ns: int) -> None:
        """At most that long; less when something comes, which may be due before."""
        if self._loss is None:
            self._take_one(duration_ns / 1e9)
        else:
            time.sleep(duration_ns / 1e9)

    def _take_one(self, timeout: float) -> bool:
        """Hold the next message of the link; a peer that is lost is so only once its last message was handed over."""
        try:
            message = self._link.receive(timeout)
        except PeerLostError as error:
            self._loss = error
            return False
        if message is not None:
            self._held.append((self._link.sent_ns, message))
        return message is not None


class DelayedListener(DelayedTransport):
    """The end that the other one connects to, delayed. A `Listener`."""

    def __init__(self, link: Listener, delay_seconds: float) -> None:
        super().__init__(link, delay_seconds)
        self.address = link.address
        """Where to connect to."""
