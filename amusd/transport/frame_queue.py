"""A bounded queue of frames between two threads, which either of them may end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from amusd.errors import PeerLostError
from amusd.protocol.wire import MAX_FRAME_BYTES
from amusd.transport.base import MAX_QUEUED_MESSAGES

MAX_QUEUED_BYTES = 2 * MAX_FRAME_BYTES
"""Bytes of all frames that wait, together."""


class FrameQueue:
    """Frames in order, at most `MAX_QUEUED_MESSAGES` and `MAX_QUEUED_BYTES` of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._frames: deque[bytes] = deque()
        self._num_bytes = 0
        self.ending: str | None = None
        """Why the queue has ended; None while it is in use."""

    def __len__(self) -> int:
        return len(self._frames)

    def put(self, frame: bytes, timeout: float | None = None) -> bool:
        """Append a frame; False when there is no room within `timeout` seconds (None: wait), or the queue has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self.ending is not None or self.has_room(len(frame)), timeout)
            if self.ending is not None or not self.has_room(len(frame)):
                return False
            self._frames.append(frame)
            self._num_bytes += len(frame)
            self._changed.notify_all()
            return True

    def has_room(self, num_bytes: int) -> bool:
        """Whether a frame of so many bytes fits now."""
        return len(self._frames) < MAX_QUEUED_MESSAGES and self._num_bytes + num_bytes <= MAX_QUEUED_BYTES

    def take(self, timeout: float) -> bytes | None:
        """The next frame, or None after `timeout` seconds. Raises PeerLostError once it has ended and is empty."""
        return next(iter(self.take_batch(timeout, lambda _: False)), None)

    def take_batch(self, timeout: float, fits: Callable[[list[bytes]], bool]) -> list[bytes]:
        """The next frame and those behind it with which it `fits`; empty after `timeout` seconds. Raises as `take`."""
        with self._changed:
            wait_seconds = min(timeout, threading.TIMEOUT_MAX)
            self._changed.wait_for(lambda: bool(self._frames) or self.ending is not None, wait_seconds)
            if not self._frames:
                if self.ending is not None:
                    raise PeerLostError(self.ending)
                return []
            batch = [self._frames.popleft()]
            while self._frames and fits([*batch, self._frames[0]]):
                batch.append(self._frames.popleft())
            self._num_bytes -= sum(map(len, batch))
            self._changed.notify_all()
            return batch

    def end(self, reason: str, *, discard: bool = False) -> None:
        """Let no more frames in; those that are in can still be taken unless discarded. The first reason stays."""
        with self._changed:
            if discard:
                self._frames.clear()
                self._num_bytes = 0
            self.ending = self.ending or reason
            self._changed.notify_all()
