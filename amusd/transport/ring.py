"""One direction of a shared-memory link: records in a ring of bytes that one end writes and the other only reads.

Each end owns one area of memory, writes to it alone, and maps the other end's area read-only. An area is

    offset  size  what its owner publishes
    0       8     position behind the last record it has written (bytes since the start, never wrapping)
    64      8     position up to which it has read the other end's ring
    128     8     how often it went to sleep and woke up: odd while it sleeps
    4096    -     its ring: records, one behind the other, wrapped around the end

and a record is {length u32, CRC-32 u32} and the frame, padded to 8 bytes. A writer stores the record first and the
position last, which is one aligned store: killed at any moment, it leaves whole records and nothing else. Where the
hardware shows stores in another order (not x86) the checksum, which covers the position too, makes a record that is not
yet whole differ from one that is. Whatever is read from the other end's area is checked before it is used.
"""

from __future__ import annotations

import mmap
import struct
import time
import zlib

from amusd.errors import PeerProtocolError
from amusd.protocol.wire import MAX_FRAME_BYTES

CONTROL_BYTES = mmap.PAGESIZE
"""Before the ring; the words in it are a cache line apart, because two processes use them at once."""
RING_BYTES = 2 * MAX_FRAME_BYTES + mmap.PAGESIZE
"""Room of one direction: two of the longest frames, or a hundred thousand candidates. Unused pages cost nothing."""

_WRITTEN, _READ, _SLEEPS = 0, 8, 16  # indices of 64-bit words
_HEADER = struct.Struct("<II")
_SETTLE_SECONDS = 0.00002  # for a record that seems damaged; what its writer stored becomes visible within less


class Area:
    """The memory of one end, mapped by it for writing or by the other end for reading."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self.mapping = mapping
        self.num_ring_bytes = len(mapping) - CONTROL_BYTES
        self.words = memoryview(mapping).cast("Q")

    @property
    def num_sleeps(self) -> int:
        """How often its owner went to sleep and woke up: odd while it sleeps."""
        return self.words[_SLEEPS]

    def note_sleep(self) -> None:
        """Its owner goes to sleep, or wakes up."""
        self.words[_SLEEPS] += 1

    def close(self) -> None:
        """Unmap it. Idempotent."""
        self.words.release()
        self.mapping.close()


class RingWriter:
    """Puts frames into the ring of its own area."""

    def __init__(self, own: Area) -> None:
        self._own = own
        self._position = 0
        self._known_read = 0
        self._reader: Area | None = None

    def attach(self, reader: Area) -> None:
        """From now on the other end tells how far it has read."""
        self._reader = reader

    def put(self, frame: bytes) -> bool:
        """Append a frame; False when the ring is too full for it. Raises PeerProtocolError."""
        position, own = self._position, self._own
        end = position + (_HEADER.size + len(frame) + 7 & ~7)
        if end - self._known_read > own.num_ring_bytes and end - self._read_position() > own.num_ring_bytes:
            return False
        record = _HEADER.pack(len(frame), zlib.crc32(frame, position & 0xFFFFFFFF)) + frame
        start = CONTROL_BYTES + position % own.num_ring_bytes
        room = len(own.mapping) - start
        if len(record) <= room:
            own.mapping[start : start + len(record)] = record
        else:
            own.mapping[start:] = record[:room]
            own.mapping[CONTROL_BYTES : CONTROL_BYTES + len(record) - room] = record[room:]
        self._position = end
        own.words[_WRITTEN] = end  # last: only now there is a record
        return True

    def _read_position(self) -> int:
        if self._reader is not None:
            read = self._reader.words[_READ]
            if not self._known_read <= read <= self._position:
                raise PeerProtocolError(f"the peer claims to have read up to {read} of {self._position} bytes")
            self._known_read = read
        return self._known_read


class RingReader:
    """Takes frames out of the ring of the other end's area."""

    def __init__(self, own: Area, writer: Area) -> None:
        self._own = own
        self._writer = writer
        self._words = writer.words
        self._position = 0

    def has_news(self) -> bool:
        """Whether `take` has something to look at."""
        return self._words[_WRITTEN] != self._position

    def take(self) -> bytes | None:
        """The next frame, or None when there is none; empty for a record that is damaged, which is stepped over.

        Raises PeerProtocolError when the position or a length cannot be right: nothing behind it can be found.
        """
        position = self._position
        num_bytes = self._words[_WRITTEN] - position
        if num_bytes == 0:
            return None
        if num_bytes < _HEADER.size or num_bytes > self._writer.num_ring_bytes or num_bytes % 8:
            raise PeerProtocolError(f"the peer claims that {num_bytes} bytes wait in the ring")
        looks_until = 0.0
        while True:
            length, checksum = _HEADER.unpack(self._copy(position, _HEADER.size))
            if _HEADER.size + length <= num_bytes and length <= MAX_FRAME_BYTES:
                frame = self._copy(position + _HEADER.size, length)
                if zlib.crc32(frame, position & 0xFFFFFFFF) == checksum:
                    self._step_over(length)
                    return frame
            now = time.monotonic()
            looks_until = looks_until or now + _SETTLE_SECONDS
            if now >= looks_until:
                break
        if _HEADER.size + length > num_bytes:
            raise PeerProtocolError(f"the peer claims a record of {length} bytes, {num_bytes} bytes wait in the ring")
        self._step_over(length)
        return b""

    def _step_over(self, length: int) -> None:
        self._position += _HEADER.size + length + 7 & ~7
        self._own.words[_READ] = self._position

    def _copy(self, position: int, length: int) -> bytes:
        writer = self._writer
        start = CONTROL_BYTES + position % writer.num_ring_bytes
        room = len(writer.mapping) - start
        if length <= room:
            return writer.mapping[start : start + length]
        return writer.mapping[start:] + writer.mapping[CONTROL_BYTES : CONTROL_BYTES + length - room]
