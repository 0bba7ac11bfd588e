"""A bounded queue of frames between two threads."""

from __future__ import annotations

import threading
from collections import deque

from amusd.errors import PeerLostError
from amusd.protocol.wire import MAX_FRAME_BYTES
from amusd.transport.base import MAX_QUEUED_MESSAGES

MAX_QUEUED_BYTES = 2 * MAX_FRAME_BYTES


class FrameQueue:
    """Frames in order, at most `MAX_QUEUED_MESSAGES` and `MAX_QUEUED_BYTES` of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._frames: deque[bytes] = deque()
        self._num_bytes = 0
        self.ending: str | None = None

    def __len__(self) -> int:
        return len(self._frames)

    def put(self, frame: bytes, timeout: float | None = None) -> bool:
        """Append a frame; False without room within `timeout` seconds (None: wait), or after the end."""
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

    def take(self, timeout: float | None = None) -> bytes | None:
        """The next frame; None after `timeout` seconds (None: wait). Raises PeerLostError once ended and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._frames or self.ending is not None, timeout)
            if not self._frames:
                if self.ending is not None:
                    raise PeerLostError(self.ending)
                return None
            frame = self._frames.popleft()
            self._num_bytes -= len(frame)
            self._changed.notify_all()
            return frame

    def end(self, reason: str, *, discard: bool = False) -> None:
        """Refuse further frames; the queued ones can be taken unless discarded. The first reason stays."""
        with self._changed:
            if discard:
                self._frames.clear()
                self._num_bytes = 0
            self.ending = self.ending or reason
            self._changed.notify_all()
