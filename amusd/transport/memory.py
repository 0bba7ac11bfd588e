"""A link inside one process, between two threads: real frames, seeded delays, and a peer that can be killed.

It ships with the package because every test of a worker needs a link whose faults it can choose. Messages cross it as
frames of `protocol/wire.py`, so that what is tested here is what travels elsewhere.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque

from amusd.errors import PeerLostError
from amusd.protocol.messages import Message
from amusd.protocol.wire import encode
from amusd.transport.base import MAX_QUEUED_MESSAGES, FrameFilter


def memory_pair(
    *, seed: int | None = None, max_delay_seconds: float = 0.0, nonce: int = 0
) -> tuple[MemoryTransport, MemoryTransport]:
    """Two ends of one link. Every message is delayed by up to `max_delay_seconds`, drawn from `seed`; order is kept."""
    one_way = _Direction(random.Random(f"{seed} one way"), max_delay_seconds)  # noqa: S311  # delays, not secrets
    other_way = _Direction(random.Random(f"{seed} other way"), max_delay_seconds)  # noqa: S311  # delays, not secrets
    return MemoryTransport(one_way, other_way, nonce), MemoryTransport(other_way, one_way, nonce)


class _Direction:
    """Frames on their way from one end to the other. Its condition guards everything in it."""

    def __init__(self, delays: random.Random, max_delay_seconds: float) -> None:
        self.changed = threading.Condition()
        self.frames: deque[tuple[float, bytes]] = deque()
        """(monotonic second from which it may be received, frame), in sending order."""
        self.delay_seconds = 0.0
        self.writer_gone = False
        self.reader_gone = False
        self._delays = delays
        self._max_delay_seconds = max_delay_seconds

    def put(self, frame: bytes) -> None:
        """Append a frame. The caller holds `changed`."""
        due = time.monotonic() + self.delay_seconds + self._delays.uniform(0.0, self._max_delay_seconds)
        if self.frames:
            due = max(due, self.frames[-1][0])
        self.frames.append((due, frame))
        self.changed.notify_all()

    def take(self, deadline: float) -> bytes | None:
        """The next frame, or None at `deadline`. The caller holds `changed`. Raises PeerLostError."""
        while True:
            if self.reader_gone:
                raise PeerLostError("this end of the link is closed")
            now = time.monotonic()
            if self.frames and self.frames[0][0] <= now:
                return self.frames.popleft()[1]
            if self.writer_gone and not self.frames:
                raise PeerLostError("the peer closed the link")
            wake = min(deadline, self.frames[0][0]) if self.frames else deadline
            if now >= deadline:
                return None
            self.changed.wait(min(wake - now, threading.TIMEOUT_MAX))


class MemoryTransport:
    """One end of a `memory_pair`. A `Transport`; its faults may be set from any thread."""

    def __init__(self, outgoing: _Direction, incoming: _Direction, nonce: int) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._nonce = nonce
        self._filter = FrameFilter(nonce)

    @property
    def num_rejected(self) -> int:
        """Frames dropped because they were malformed or of another session."""
        return self._filter.num_rejected

    @property
    def sent_ns(self) -> int:
        """When the message received last was sent, by its sender's monotonic clock."""
        return self._filter.sent_ns

    @property
    def delay_seconds(self) -> float:
        """Added to the delay of every message sent from now on; later messages never overtake delayed ones."""
        return self._outgoing.delay_seconds

    @delay_seconds.setter
    def delay_seconds(self, seconds: float) -> None:
        with self._outgoing.changed:
            self._outgoing.delay_seconds = seconds

    def send(self, message: Message) -> None:
        """Queue a message. Raises PeerLostError."""
        self.inject(encode(message, self._nonce, time.monotonic_ns()))

    def inject(self, frame: bytes) -> None:
        """Queue any bytes, as a broken or foreign peer might. Raises PeerLostError."""
        with self._outgoing.changed:
            if self._outgoing.writer_gone:
                raise PeerLostError("this end of the link is closed")
            if self._outgoing.reader_gone:
                raise PeerLostError("the peer closed the link")
            if len(self._outgoing.frames) >= MAX_QUEUED_MESSAGES:
                raise PeerLostError(f"the peer stopped reading: {MAX_QUEUED_MESSAGES} messages wait for it")
            self._outgoing.put(frame)

    def receive(self, timeout: float) -> Message | None:
        """The next message, or None after `timeout` seconds. Raises PeerLostError."""
        deadline = time.monotonic() + timeout
        while True:
            with self._incoming.changed:
                frame = self._incoming.take(deadline)
            if frame is None:
                return None
            message = self._filter.accept(frame)
            if message is not None:
                return message

    def close(self) -> None:
        """Release everything. Idempotent; never raises."""
        with self._outgoing.changed:
            self._outgoing.writer_gone = True
            self._outgoing.changed.notify_all()
        with self._incoming.changed:
            self._incoming.reader_gone = True
            self._incoming.frames.clear()
            self._incoming.changed.notify_all()

    def kill(self) -> None:
        """As if this end's process died, at any moment and from any thread.

        What it has sent is still delivered, delays included; then the peer gets `PeerLostError`, at once on `send`. The
        thread that used this end gets `PeerLostError` too, also out of a `receive` that is under way.
        """
        self.close()
