"""One direction of a `torch.distributed` link: frames as uint8 tensors, over process groups of two.

What is sent at once travels in a block of `BLOCK_BYTES`: two lengths (uint32, little-endian), of the records that
follow and of a body. A record is a frame behind its length. A frame too long for a block follows as a body, a tensor
of exactly its length. So the receiver always knows what to wait for, which both backends need, and bodies may take
another way than blocks:

    gloo    blocks and bodies from host to host
    nccl    blocks over gloo, bodies from device to device over NCCL

A posted NCCL receive is a kernel that spins on the device until the sender comes. It is therefore posted only when a
block, which the host waits for, has said that the body is under way.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from amusd.errors import WireError
from amusd.protocol.wire import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # a torch without distributed has none

BLOCK_BYTES = 4096
"""Bytes of every block: room for all but prompts, long reports and rows of probabilities."""

_HEADER = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
_RECORDS_BYTES = BLOCK_BYTES - _HEADER.size
_GOODBYE = 0xFFFFFFFF
_BLOCK_TAG = 0
_BODY_TAG = 1
_INTERRUPT_TAG = 2


@dataclass(frozen=True)
class Bodies:
    """The way of bodies: over which group of two, between which devices, and how long one may take."""

    group: ProcessGroup
    patience: timedelta
    device: str = "cpu"
    on_stream: Callable[[], AbstractContextManager[Any]] = nullcontext

    def send(self, frame: bytes, peer: int) -> None:
        """Hand the whole frame over. Raises RuntimeError."""
        with self.on_stream():
            tensor = torch.frombuffer(bytearray(frame), dtype=torch.uint8).to(self.device)
            self.group.send([tensor], peer, _BODY_TAG).wait(self.patience)

    def receive(self, num_bytes: int, peer: int) -> bytes:
        """A frame of that many bytes. Raises RuntimeError."""
        with self.on_stream():
            tensor = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            self.group.recv([tensor], peer, _BODY_TAG).wait(self.patience)
            return bytes(tensor.cpu().numpy().tobytes())


class Lane:
    """One direction between this process and the peer. One thread at a time uses it; `interrupt` is for any."""

    def __init__(self, blocks: ProcessGroup, bodies: Bodies, *, peer: int, patience: timedelta) -> None:
        """`peer`: its rank. `patience`: longest wait for the peer, in either direction."""
        self._blocks = blocks
        self._bodies = bodies
        self._peer = peer
        self._patience = patience
        self._buffer = bytearray(BLOCK_BYTES)
        self._block = torch.frombuffer(self._buffer, dtype=torch.uint8)

    def send(self, frames: list[bytes]) -> None:
        """Hand over frames that `fit_a_block`, or a single one; no frame at all is a heartbeat. Raises RuntimeError."""
        if fit_a_block(frames):
            self._send_block(b"".join(_LENGTH.pack(len(frame)) + frame for frame in frames), 0)
            return
        (frame,) = frames
        self._send_block(b"", len(frame))
        self._bodies.send(frame, self._peer)

    def send_goodbye(self) -> None:
        """Tell the peer that nothing more comes. Raises RuntimeError."""
        self._send_block(b"", _GOODBYE)

    def receive(self) -> list[bytes] | None:
        """The next frames, or None when the peer said goodbye. Raises RuntimeError, and WireError on a bad block."""
        self._blocks.recv([self._block], self._peer, _BLOCK_TAG).wait(self._patience)
        records_bytes, body_bytes = _HEADER.unpack_from(self._buffer)
        if body_bytes == _GOODBYE:
            return None
        if body_bytes > MAX_FRAME_BYTES:
            raise WireError(f"the peer announced a frame of {body_bytes} bytes, at most {MAX_FRAME_BYTES} are allowed")
        if records_bytes > _RECORDS_BYTES:
            raise WireError(f"the peer announced {records_bytes} bytes in a block of {BLOCK_BYTES}")
        frames = _split(bytes(self._buffer[_HEADER.size : _HEADER.size + records_bytes]))
        if body_bytes:
            frames.append(self._bodies.receive(body_bytes, self._peer))
        return frames

    def interrupt(self) -> None:
        """End every wait of this lane, in other threads too. It cannot be used again.

        Gloo cannot take a wait back. But one that runs out breaks the connection, and with it all others.
        """
        with suppress(RuntimeError):
            self._bodies.group.abort()
        with suppress(RuntimeError):
            nothing = torch.empty(1, dtype=torch.uint8)
            self._blocks.recv([nothing], self._peer, _INTERRUPT_TAG).wait(timedelta(milliseconds=1))

    def _send_block(self, records: bytes, body_bytes: int) -> None:
        _HEADER.pack_into(self._buffer, 0, len(records), body_bytes)
        self._buffer[_HEADER.size : _HEADER.size + len(records)] = records
        self._blocks.send([self._block], self._peer, _BLOCK_TAG).wait(self._patience)


def fit_a_block(frames: list[bytes]) -> bool:
    """True when all frames go into one block."""
    return sum(_LENGTH.size + len(frame) for frame in frames) <= _RECORDS_BYTES


def _split(records: bytes) -> list[bytes]:
    frames = []
    offset = 0
    while offset < len(records):
        start = offset + _LENGTH.size
        offset = start + _LENGTH.unpack_from(records, offset)[0] if start <= len(records) else start
        if offset > len(records):
            raise WireError("a record goes beyond its block")
        frames.append(records[start:offset])
    return frames
