"""The memory of a shared-memory link: two rings of records, one for each direction. Linux only.

The memory has two areas. Each end writes its own area and maps the other one read-only. An area has

    offset  size  content
    0       8     written position: bytes that its owner has written into this ring since the start
    64      8     read position: bytes that its owner has read from the other end's ring since the start
    a page  -     the ring; a record that reaches the end goes on at the beginning

A record is {length u32, CRC-32 u32} and the frame, padded to 8 bytes. The writer stores the written position last, in
one aligned store: if killed before, it leaves no visible part of the record. CPUs other than x86 may show the position
first; until the record is visible, the checksum, which covers the position too, is wrong.

The reader checks every position and length from the other end before using it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
import zlib
from typing import NoReturn

from amusd.errors import PeerLostError
from amusd.protocol.wire import MAX_FRAME_BYTES

CONTROL_BYTES = mmap.PAGESIZE
"""Bytes before the ring; the positions are a cache line apart, since both processes use them at once."""
RING_BYTES = 2 * MAX_FRAME_BYTES + mmap.PAGESIZE
"""Room for two of the longest frames, or 100,000 candidates; unused pages cost nothing."""
AREA_BYTES = CONTROL_BYTES + RING_BYTES

_WRITTEN, _READ = 0, 8  # indices of 64-bit words
_HEADER = struct.Struct("<II")
_VISIBLE_SECONDS = 0.00002  # wait for a record that seems damaged; stores become visible sooner


def make_memory() -> int:
    """File descriptor of new memory. Raises OSError, or AttributeError on a platform without anonymous files."""
    descriptor = os.memfd_create("amusd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 2 * AREA_BYTES)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


class Rings:
    """Both rings as one end sees them."""

    def __init__(self, own: mmap.mmap, theirs: mmap.mmap) -> None:
        """`own`: the area that this end writes; `theirs`: the other end's."""
        self._own, self._theirs = own, theirs
        self._own_words, self._their_words = (memoryview(area).cast("Q") for area in (own, theirs))
        self._written = 0
        self._read = 0
        self._known_read = 0  # as last seen
        self._failure: str | None = None

    @classmethod
    def map(cls, descriptor: int, number: int) -> Rings:
        """Map the rings for the end that writes area `number`, 0 or 1. Raises OSError, ValueError for other memory."""
        own = mmap.mmap(descriptor, AREA_BYTES, offset=number * AREA_BYTES)
        place = (1 - number) * AREA_BYTES
        return cls(own, mmap.mmap(descriptor, AREA_BYTES, prot=mmap.PROT_READ, offset=place))

    def close(self) -> None:
        """Unmap both. Idempotent. The other end can still take frames."""
        for memory in (self._own_words, self._their_words):
            memory.release()
        for area in (self._own, self._theirs):
            area.close()

    def put(self, frame: bytes) -> bool:
        """Append a frame; False when the ring is too full for it. Raises PeerLostError."""
        if self._failure is not None:
            raise PeerLostError(self._failure)
        position, own = self._written, self._own
        end, size = position + _record_bytes(len(frame)), _ring_bytes(own)
        if end - self._known_read > size and end - self._read_position() > size:
            return False
        record = _HEADER.pack(len(frame), zlib.crc32(frame, position & 0xFFFFFFFF)) + frame
        start = CONTROL_BYTES + position % size
        room = len(own) - start
        if len(record) <= room:
            own[start : start + len(record)] = record
        else:
            own[start:] = record[:room]
            own[CONTROL_BYTES : CONTROL_BYTES + len(record) - room] = record[room:]
        self._written = end
        self._own_words[_WRITTEN] = end  # last: this makes the record visible
        return True

    def has_room(self, num_bytes: int) -> bool:
        """Whether `num_bytes`, in frames of the largest size, fit. Raises PeerLostError."""
        taken = num_bytes + (1 + num_bytes // MAX_FRAME_BYTES) * _record_bytes(0)
        return self._written + taken - self._read_position() <= _ring_bytes(self._own)

    def has_news(self) -> bool:
        """Whether the other end has written something new."""
        return self._their_words[_WRITTEN] != self._read

    def take(self) -> bytes | None:
        """The next frame; None without one, empty for a damaged record.

        Raises PeerLostError for an impossible position or length: no later record can be found.
        """
        position, theirs = self._read, self._theirs
        num_bytes = self._their_words[_WRITTEN] - position
        if num_bytes == 0:
            return None
        if num_bytes < _HEADER.size or num_bytes > _ring_bytes(theirs) or num_bytes % 8:
            self._fail(f"the peer claims that {num_bytes} bytes wait in the ring")
        looks_until = time.monotonic() + _VISIBLE_SECONDS
        while True:
            length, checksum = _HEADER.unpack(_copy(theirs, position, _HEADER.size))
            if _HEADER.size + length <= num_bytes and length <= MAX_FRAME_BYTES:
                frame = _copy(theirs, position + _HEADER.size, length)
                if zlib.crc32(frame, position & 0xFFFFFFFF) == checksum:
                    break
            if time.monotonic() >= looks_until:
                if _HEADER.size + length > num_bytes:
                    self._fail(f"the peer claims a record of {length} bytes, {num_bytes} bytes wait in the ring")
                frame = b""
                break
        self._read = position + _record_bytes(length)
        self._own_words[_READ] = self._read
        return frame

    def _fail(self, reason: str) -> NoReturn:
        """Count the other end as lost: it has written something impossible."""
        self._failure = reason
        raise PeerLostError(reason)

    def _read_position(self) -> int:
        read = self._their_words[_READ]
        if not self._known_read <= read <= self._written:
            self._fail(f"the peer claims to have read up to {read} of {self._written} bytes")
        self._known_read = read
        return read


def _record_bytes(length: int) -> int:
    return _HEADER.size + length + 7 & ~7


def _ring_bytes(area: mmap.mmap) -> int:
    return len(area) - CONTROL_BYTES


def _copy(area: mmap.mmap, position: int, length: int) -> bytes:
    start = CONTROL_BYTES + position % _ring_bytes(area)
    room = len(area) - start
    if length <= room:
        return area[start : start + length]
    return area[start:] + area[CONTROL_BYTES : CONTROL_BYTES + length - room]
