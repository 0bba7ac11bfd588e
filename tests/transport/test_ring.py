"""The bytes of a shared-memory link: a queue whatever the sizes, and safe from whatever the other end writes."""

from __future__ import annotations

import mmap
import struct
import zlib
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amusd.errors import PeerLostError
from amusd.protocol.wire import MAX_FRAME_BYTES
from amusd.transport.ring import CONTROL_BYTES, Rings

SMALL = 256


class Pair:
    def __init__(self, num_ring_bytes: int = SMALL) -> None:
        self.sender, self.receiver = (mmap.mmap(-1, CONTROL_BYTES + size) for size in (num_ring_bytes, 4096))
        self.writer = Rings(self.sender, self.receiver)
        self.reader = Rings(self.receiver, self.sender)
        self.sent, self.received = (memoryview(area).cast("Q") for area in (self.sender, self.receiver))

    def claim(self, written: int) -> None:
        self.sent[0] = written

    def overwrite(self, offset: int, data: bytes) -> None:
        self.sender[CONTROL_BYTES + offset : CONTROL_BYTES + offset + len(data)] = data


def room_of(frame: bytes) -> int:
    return -(-(8 + len(frame)) // 8) * 8


steps = st.lists(st.one_of(st.none(), st.binary(max_size=SMALL - 8), st.binary(max_size=40)), max_size=60)


@given(steps)
def test_it_is_a_queue_of_bounded_size_whatever_the_lengths(steps: list[bytes | None]) -> None:
    pair, model = Pair(), deque[bytes]()
    for frame in steps:
        if frame is None:
            assert pair.reader.take() == (model.popleft() if model else None)
        else:
            fits = sum(map(room_of, model)) + room_of(frame) <= SMALL
            assert pair.writer.put(frame) is fits
            if fits:
                model.append(frame)
        assert pair.reader.has_news() is bool(model)
    assert [pair.reader.take() for _ in range(len(model) + 1)] == [*model, None]


@given(steps, st.binary(min_size=SMALL, max_size=SMALL), st.integers(0, 2**64 - 1))
def test_whatever_is_written_gives_frames_or_one_error(steps: list[bytes | None], garbage: bytes, written: int) -> None:
    pair = Pair()
    for frame in steps:
        if frame is None:
            pair.reader.take()
        else:
            pair.writer.put(frame)
    pair.overwrite(0, garbage)
    for claimed in (pair.sent[0], pair.sent[0] + 8, written):
        pair.claim(claimed % 2**64)
        try:
            while (taken := pair.reader.take()) is not None:
                assert len(taken) <= SMALL
        except PeerLostError:
            pass


@pytest.mark.parametrize("num_claimed", [1, 4, 12, SMALL + 8, 2**63, 2**64 - 8])
def test_a_position_that_cannot_be_is_refused(num_claimed: int) -> None:
    pair = Pair()
    pair.claim(num_claimed)
    with pytest.raises(PeerLostError, match="bytes wait in the ring"):
        pair.reader.take()


@pytest.mark.parametrize("length", [9, SMALL, MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_length_beyond_what_was_written_is_refused_and_nothing_outside_is_read(length: int) -> None:
    pair = Pair()
    pair.overwrite(0, struct.pack("<II", length, zlib.crc32(b"", 0)))
    pair.claim(16)
    with pytest.raises(PeerLostError, match=f"record of {length} bytes"):
        pair.reader.take()


def test_a_damaged_record_is_empty_and_the_next_one_is_whole() -> None:
    pair = Pair()
    assert pair.writer.put(b"first")
    assert pair.writer.put(b"second")
    pair.overwrite(8, b"F")
    assert [pair.reader.take() for _ in range(3)] == [b"", b"second", None]


def test_a_record_of_an_earlier_lap_is_not_taken_for_a_new_one() -> None:
    pair = Pair()
    for _ in range(SMALL // 16):
        assert pair.writer.put(b"12345678")
        assert pair.reader.take() == b"12345678"
    pair.claim(SMALL + 16)  # the position is there, the new record not yet
    assert pair.reader.take() == b""


@pytest.mark.parametrize("claimed", [8, 2**64 - 1])
def test_a_reader_that_claims_more_than_was_written_is_refused(claimed: int) -> None:
    pair = Pair()
    pair.received[8] = claimed
    with pytest.raises(PeerLostError, match="claims to have read"):
        pair.writer.put(bytes(SMALL))
