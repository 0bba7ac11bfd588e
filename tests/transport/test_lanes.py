"""What is asked of the process groups, in which order and in which shapes, and what bad blocks do."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amusd.errors import WireError
from amusd.protocol.wire import MAX_FRAME_BYTES
from amusd.transport.lanes import BLOCK_BYTES, Bodies, Lane, fit_a_block

PATIENCE = timedelta(seconds=7)
BODY_PATIENCE = timedelta(seconds=3)
LONG = b"long" * BLOCK_BYTES
ROOM = BLOCK_BYTES - 8 - 4
"""Of one frame in a block: two lengths, and the record's own."""


class FakeGroup:
    """A process group of one, in memory: what it sends it receives, and it writes down what it was asked for."""

    def __init__(self, name: str, calls: list[tuple[object, ...]]) -> None:
        self.name = name
        self.calls = calls
        self.wire: deque[torch.Tensor] = deque()

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Mock:
        self.wire.append(tensors[0].clone())
        return self._work("send", len(tensors[0]), rank)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Mock:
        sent = self.wire.popleft()
        assert sent.shape == tensors[0].shape  # NCCL does not forgive another length
        tensors[0].copy_(sent)
        return self._work("receive", len(tensors[0]), rank)

    def _work(self, *call: object) -> Mock:
        return Mock(wait=lambda timeout: self.calls.append((self.name, *call, timeout)))


class Ends:
    """Both ends of a lane, over one group for blocks and another for bodies."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.gloo, self.nccl = FakeGroup("gloo", self.calls), FakeGroup("nccl", self.calls)
        bodies = Bodies(self.nccl, BODY_PATIENCE, on_stream=self.stream)
        self.target = Lane(self.gloo, bodies, peer=1, patience=PATIENCE)
        self.draft = Lane(self.gloo, bodies, peer=0, patience=PATIENCE)

    @contextmanager
    def stream(self) -> Iterator[None]:
        self.calls.append(("stream",))
        yield


def test_short_frames_never_touch_the_device() -> None:
    ends = Ends()
    ends.target.send([b"one", b"", b"three"])
    assert ends.draft.receive() == [b"one", b"", b"three"]
    assert ends.calls == [("gloo", "send", BLOCK_BYTES, 1, PATIENCE), ("gloo", "receive", BLOCK_BYTES, 0, PATIENCE)]


def test_a_receive_on_the_device_is_posted_after_a_block_has_announced_it() -> None:
    ends = Ends()
    ends.target.send([LONG])
    assert ends.draft.receive() == [LONG]
    assert ends.calls == [
        ("gloo", "send", BLOCK_BYTES, 1, PATIENCE),
        ("stream",),
        ("nccl", "send", len(LONG), 1, BODY_PATIENCE),
        ("gloo", "receive", BLOCK_BYTES, 0, PATIENCE),
        ("stream",),
        ("nccl", "receive", len(LONG), 0, BODY_PATIENCE),
    ]


@given(sizes=st.lists(st.integers(0, 3 * BLOCK_BYTES), max_size=8))
def test_frames_of_any_length_arrive_in_order(sizes: list[int]) -> None:
    ends = Ends()
    for number, size in enumerate(sizes):
        ends.target.send([bytes([number]) * size])
    assert [ends.draft.receive() for _ in sizes] == [[bytes([number]) * size] for number, size in enumerate(sizes)]


def test_a_block_holds_what_it_has_room_for() -> None:
    assert fit_a_block([b"x" * ROOM])
    assert not fit_a_block([b"x" * (ROOM + 1)])
    assert not fit_a_block([b"x" * (ROOM - 3), b""])
    ends = Ends()
    ends.target.send([b"x" * ROOM])
    assert ends.draft.receive() == [b"x" * ROOM]
    assert [call[0] for call in ends.calls] == ["gloo", "gloo"]


def test_a_sign_of_life_holds_nothing_and_a_goodbye_ends_the_lane() -> None:
    ends = Ends()
    ends.target.send([])
    ends.target.send_goodbye()
    assert ends.draft.receive() == []
    assert ends.draft.receive() is None


@pytest.mark.parametrize(
    ("header", "records", "message"),
    [
        ((0, MAX_FRAME_BYTES + 1), b"", f"a frame of {MAX_FRAME_BYTES + 1} bytes"),
        ((BLOCK_BYTES, 0), b"", f"{BLOCK_BYTES} bytes in a block of {BLOCK_BYTES}"),
        ((8, 0), struct.pack("<I", 5) + b"text", "beyond its block"),
        ((3, 0), b"\0\0\0", "beyond its block"),
    ],
)
def test_a_bad_block_is_refused_before_anything_is_allocated(
    header: tuple[int, int], records: bytes, message: str
) -> None:
    ends = Ends()
    block = (struct.pack("<II", *header) + records).ljust(BLOCK_BYTES, b"\0")
    ends.gloo.wire.append(torch.frombuffer(bytearray(block), dtype=torch.uint8))
    with pytest.raises(WireError, match=message):
        ends.draft.receive()
    assert [call[0] for call in ends.calls] == ["gloo"]
