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

from amusd.errors import WireError
from amusd.transport.lanes import BLOCK_BYTES, Bodies, Lane

PATIENCE = timedelta(seconds=7)
BODY_PATIENCE = timedelta(seconds=3)
ROOM = BLOCK_BYTES - 2 * 4
"""Bytes of one frame in a block: its length and that of the payload go before it."""


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


def test_what_fits_a_block_never_touches_the_device() -> None:
    ends = Ends()
    for frames in ([b"one", b"", b"three"], [b"x" * ROOM], []):
        ends.target.send(frames)
        assert ends.draft.receive() == frames
    block = [("gloo", "send", BLOCK_BYTES, 1, PATIENCE), ("gloo", "receive", BLOCK_BYTES, 0, PATIENCE)]
    assert ends.calls == block * 3


def test_a_receive_on_the_device_is_posted_after_a_block_has_announced_it() -> None:
    ends, frames = Ends(), [b"short", b"x" * ROOM]
    ends.target.send(frames)
    assert ends.draft.receive() == frames
    num_bytes = 2 * 4 + 5 + ROOM
    assert ends.calls == [
        ("gloo", "send", BLOCK_BYTES, 1, PATIENCE),
        ("stream",),
        ("nccl", "send", num_bytes, 1, BODY_PATIENCE),
        ("gloo", "receive", BLOCK_BYTES, 0, PATIENCE),
        ("stream",),
        ("nccl", "receive", num_bytes, 0, BODY_PATIENCE),
    ]


def test_a_goodbye_ends_the_lane() -> None:
    ends = Ends()
    ends.target.send_goodbye()
    assert ends.draft.receive() is None


@pytest.mark.parametrize(
    ("length", "payload", "message"),
    [(2**31, b"", "announced"), (8, struct.pack("<I", 5) + b"text", "amid a frame"), (3, b"\0\0\0", "amid a frame")],
)
def test_a_bad_payload_is_refused_before_anything_is_allocated(length: int, payload: bytes, message: str) -> None:
    ends = Ends()
    block = (struct.pack("<I", length) + payload).ljust(BLOCK_BYTES, b"\0")
    ends.gloo.wire.append(torch.frombuffer(bytearray(block), dtype=torch.uint8))
    with pytest.raises(WireError, match=message):
        ends.draft.receive()
    assert [call[0] for call in ends.calls] == ["gloo"]
