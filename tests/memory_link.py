"""A link inside one process, between two threads: real frames, seeded delays, and a peer that can be killed.

Messages cross it as frames of `protocol/wire.py`, so that tests use the bytes that other links carry.
"""

from __future__ import annotations

import random
import threading
import time
import zlib
from collections import deque

from amusd.errors import PeerLostError
from amusd.protocol.messages import Message
from amusd.protocol.wire import encode
from amusd.transport.base import MAX_QUEUED_MESSAGES, Transport


def memory_pair(
    *, seed: int | None = None, max_delay_seconds: float = 0.0, nonce: int = 0
) -> tuple[MemoryTransport, MemoryTransport]:
    """Two ends of one link. Every message is delayed by up to `max_delay_seconds`, drawn from `seed`; order is kept."""
    one_way = _Direction(random.Random(f"{seed} one way"), max_delay_seconds)  # delays, not secrets
    other_way = _Direction(random.Random(f"{seed} other way"), max_delay_seconds)  # delays, not secrets
    return MemoryTransport(one_way, other_way, nonce), MemoryTransport(other_way, one_way, nonce)


def of_another_version(message: Message) -> bytes:
    """The frame in which a peer of protocol version 11 says it."""
    frame = b"AMSD\x0b\0" + encode(message, 0)[6:-4]
    return frame + zlib.crc32(frame).to_bytes(4, "little")


class _Direction:
    """Frames on their way from one end to the other. Its condition guards everything in it."""

    def __init__(self, delays: random.Random, max_delay_seconds: float) -> None:
        self.frames: deque[tuple[float, bytes]] = deque()
        self._changed = threading.Condition()
        self._delays = delays
        self._max_delay_seconds = max_delay_seconds
        self._writer_gone = False
        self._reader_gone = False

    def put(self, frame: bytes) -> None:
        """Append a frame. Raises PeerLostError."""
        with self._changed:
            if self._writer_gone:
                raise PeerLostError("this end of the link is closed")
            if self._reader_gone:
                raise PeerLostError("the peer closed the link")
            if len(self.frames) >= MAX_QUEUED_MESSAGES:
                raise PeerLostError(f"the peer stopped reading: {MAX_QUEUED_MESSAGES} messages wait for it")
            due = time.monotonic() + self._delays.uniform(0.0, self._max_delay_seconds)
            self.frames.append((max(due, self.frames[-1][0]) if self.frames else due, frame))
            self._changed.notify_all()

    def take(self, deadline: float) -> bytes | None:
        """The next frame, or None at `deadline`. Raises PeerLostError."""
        with self._changed:
            while True:
                if self._reader_gone:
                    raise PeerLostError("this end of the link is closed")
                now = time.monotonic()
                if self.frames and self.frames[0][0] <= now:
                    return self.frames.popleft()[1]
                if self._writer_gone and not self.frames:
                    raise PeerLostError("the peer closed the link")
                if now >= deadline:
                    return None
                wake = min(deadline, self.frames[0][0]) if self.frames else deadline
                self._changed.wait(min(wake - now, threading.TIMEOUT_MAX))

    def end_writing(self) -> None:
        with self._changed:
            self._writer_gone = True
            self._changed.notify_all()

    def end_reading(self) -> None:
        with self._changed:
            self._reader_gone = True
            self.frames.clear()
            self._changed.notify_all()


class MemoryTransport(Transport):
    def __init__(self, outgoing: _Direction, incoming: _Direction, nonce: int) -> None:
        super().__init__("memory://", nonce)
        self._outgoing = outgoing
        self._incoming = incoming

    def send_frame(self, frame: bytes) -> None:
        """Queue any bytes. Raises PeerLostError."""
        self._outgoing.put(frame)

    def receive_frame(self, timeout: float) -> bytes | None:
        """The next bytes, or None after `timeout` seconds. Raises PeerLostError."""
        return self._incoming.take(time.monotonic() + timeout)

    def close(self) -> None:
        """Release everything. Idempotent; never raises."""
        self._outgoing.end_writing()
        self._incoming.end_reading()

    def kill(self) -> None:
        """End this end as if its process died, at any moment and from any thread.

        What it has sent is still delivered, delays included; then the peer gets `PeerLostError`, at once on `send`. The
        thread that used this end gets `PeerLostError` too, also out of a `receive` that is under way.
        """
        self.close()
