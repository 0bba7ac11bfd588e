"""The memory of a shared-memory link: two rings of records, one for each direction.

Each end owns one area of memory, writes to it alone, and maps the other end's area read-only. An area is

    offset  size  what its owner publishes
    0       8     position behind the last record it has written (bytes since the start, never wrapping)
    64      8     position up to which it has read the other end's ring
    128     8     how often it went to sleep and woke up: odd while it sleeps
    4096    -     its ring: records, one behind the other, wrapped around the end

and a record is {length u32, CRC-32 u32} and the frame, padded to 8 bytes. A writer stores the record first and the
position last, which is one aligned store: killed at any moment, it leaves whole records and nothing else. Hardware
other than x86 may show stores in another order; then the checksum, which covers the position too, tells a record that
is not yet whole. Whatever is read from the other end's area is checked before it is used.

The memory is an anonymous file: it has no name that could stay behind, it goes when both processes have gone, however
they ended, and it is sealed, so that no peer can shrink it under a reader. Linux only, as are its parts.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
import zlib

from amusd.errors import ConfigError, PeerProtocolError, WireError
from amusd.protocol.wire import MAX_FRAME_BYTES

CONTROL_BYTES = mmap.PAGESIZE
"""The bytes before the ring; the words in it are a cache line apart, because two processes use them at once."""
RING_BYTES = 2 * MAX_FRAME_BYTES + mmap.PAGESIZE
"""Room of one direction: two of the longest frames, or a hundred thousand candidates. Unused pages cost nothing."""
AREA_BYTES = CONTROL_BYTES + RING_BYTES

_WRITTEN, _READ, _SLEEPS = 0, 8, 16  # indices of 64-bit words
_HEADER = struct.Struct("<II")
_SETTLE_SECONDS = 0.00002  # for a record that seems damaged; what its writer stored becomes visible within less


class Area:
    """The memory of one end, mapped by it for writing or by the other end for reading."""

    def __init__(self, mapping: mmap.mmap, descriptor: int | None = None) -> None:
        self.mapping = mapping
        self.descriptor = descriptor
        """File descriptor that its owner passes to the other end; None in a mapping of the other end's memory."""
        self.num_ring_bytes = len(mapping) - CONTROL_BYTES
        self.words = memoryview(mapping).cast("Q")

    @classmethod
    def create(cls) -> Area:
        """New memory of this end. Raises ConfigError where the platform cannot do this."""
        try:
            descriptor = os.memfd_create("amusd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (AttributeError, OSError) as error:
            raise ConfigError(f"transport=shared_memory: not on this machine, use transport=zeromq: {error}") from None
        try:
            os.ftruncate(descriptor, AREA_BYTES)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())
            return cls(mmap.mmap(descriptor, AREA_BYTES), descriptor)
        except OSError as error:
            os.close(descriptor)
            raise ConfigError(f"transport=shared_memory: no {AREA_BYTES >> 20} MiB of memory: {error}") from None

    @classmethod
    def map(cls, descriptor: int) -> Area:
        """The other end's memory, for reading. Raises WireError when it cannot be trusted."""
        try:
            is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() == _seals()
            if not is_sealed or os.fstat(descriptor).st_size != AREA_BYTES:
                raise WireError("its memory is of another size, or could change it")
            return cls(mmap.mmap(descriptor, AREA_BYTES, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
        except OSError as error:
            raise WireError(f"its memory cannot be used: {error}") from None

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
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class Rings:
    """Both rings as one end sees them: puts frames into its own area, takes them out of the other end's."""

    def __init__(self, own: Area, theirs: Area | None = None) -> None:
        self.own = own
        self.theirs = theirs
        """The area of the other end; None until it has come, and nothing can be taken before."""
        self._written = 0
        self._read = 0
        self._known_read = 0  # by the other end

    def put(self, frame: bytes) -> bool:
        """Append a frame; False when the ring is too full for it. Raises PeerProtocolError."""
        position, own = self._written, self.own
        end = position + _record_bytes(len(frame))
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
        self._written = end
        own.words[_WRITTEN] = end  # last: only now there is a record
        return True

    def has_room(self, num_bytes: int) -> bool:
        """Whether frames of so many bytes, of the largest size, fit. Raises PeerProtocolError."""
        taken = num_bytes + (1 + num_bytes // MAX_FRAME_BYTES) * _record_bytes(0)
        return self._written + taken - self._read_position() <= self.own.num_ring_bytes

    def has_news(self) -> bool:
        """True when `take` has something to look at."""
        return self.theirs is not None and self.theirs.words[_WRITTEN] != self._read

    def take(self) -> bytes | None:
        """The next frame, or None when there is none; empty for a record that is damaged, which is stepped over.

        Raises PeerProtocolError when the position or a length cannot be right: nothing behind it can be found.
        """
        position, theirs = self._read, self.theirs
        if theirs is None:
            return None
        num_bytes = theirs.words[_WRITTEN] - position
        if num_bytes == 0:
            return None
        if num_bytes < _HEADER.size or num_bytes > theirs.num_ring_bytes or num_bytes % 8:
            raise PeerProtocolError(f"the peer claims that {num_bytes} bytes wait in the ring")
        looks_until = 0.0
        while True:
            length, checksum = _HEADER.unpack(_copy(theirs, position, _HEADER.size))
            if _HEADER.size + length <= num_bytes and length <= MAX_FRAME_BYTES:
                frame = _copy(theirs, position + _HEADER.size, length)
                if zlib.crc32(frame, position & 0xFFFFFFFF) == checksum:
                    break
            now = time.monotonic()
            looks_until = looks_until or now + _SETTLE_SECONDS
            if now >= looks_until:
                if _HEADER.size + length > num_bytes:
                    raise PeerProtocolError(
                        f"the peer claims a record of {length} bytes, {num_bytes} bytes wait in the ring"
                    )
                frame = b""
                break
        self._read = position + _record_bytes(length)
        self.own.words[_READ] = self._read
        return frame

    def _read_position(self) -> int:
        """Return how far the other end has read, checked."""
        if self.theirs is not None:
            read = self.theirs.words[_READ]
            if not self._known_read <= read <= self._written:
                raise PeerProtocolError(f"the peer claims to have read up to {read} of {self._written} bytes")
            self._known_read = read
        return self._known_read


def _record_bytes(length: int) -> int:
    """Bytes of a record with a frame of `length` bytes."""
    return _HEADER.size + length + 7 & ~7


def _copy(area: Area, position: int, length: int) -> bytes:
    start = CONTROL_BYTES + position % area.num_ring_bytes
    room = len(area.mapping) - start
    if length <= room:
        return area.mapping[start : start + length]
    return area.mapping[start:] + area.mapping[CONTROL_BYTES : CONTROL_BYTES + length - room]


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
