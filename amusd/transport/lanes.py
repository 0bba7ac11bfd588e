"""One direction of a `torch.distributed` link: frames as uint8 tensors, over process groups of two.

Frames that are sent together, each after its length (uint32, little-endian), are one payload. It travels after its own
length in a block of `BLOCK_BYTES`; one that is too long follows the block as a body, so that the receiver always knows
what to wait for. With `nccl` bodies go from device to device.

A posted NCCL receive is a kernel that spins on the device, so it is posted only after a block has announced the body.
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
from amusd.transport.base import MAX_QUEUED_MESSAGES
from amusd.transport.frame_queue import MAX_QUEUED_BYTES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # a torch without distributed has none

BLOCK_BYTES = 4096
"""Fits all but prompts, long reports and rows of probabilities."""

_LENGTH = struct.Struct("<I")
_GOODBYE = 0xFFFFFFFF
_MAX_PAYLOAD_BYTES = MAX_QUEUED_BYTES + MAX_QUEUED_MESSAGES * _LENGTH.size
_BLOCK_TAG = 0
_BODY_TAG = 1
_INTERRUPT_TAG = 2


@dataclass(frozen=True)
class Bodies:
    """How bodies travel: a group of two, its devices and a time limit."""

    group: ProcessGroup
    patience: timedelta
    device: str = "cpu"
    on_stream: Callable[[], AbstractContextManager[Any]] = nullcontext

    def send(self, payload: bytes, peer: int) -> None:
        """Send a payload. Raises RuntimeError."""
        with self.on_stream():
            tensor = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self.device)
            self.group.send([tensor], peer, _BODY_TAG).wait(self.patience)

    def receive(self, num_bytes: int, peer: int) -> bytes:
        """Receive a payload of that many bytes. Raises RuntimeError."""
        with self.on_stream():
            tensor = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            self.group.recv([tensor], peer, _BODY_TAG).wait(self.patience)
            return bytes(tensor.cpu().numpy().tobytes())


class Lane:
    """One direction between this process and the peer. For one thread; any may call `interrupt`."""

    def __init__(self, blocks: ProcessGroup, bodies: Bodies, *, peer: int, patience: timedelta) -> None:
        """`peer`: its rank. `patience`: longest wait for the peer."""
        self._blocks = blocks
        self._bodies = bodies
        self._peer = peer
        self._patience = patience
        self._buffer = bytearray(BLOCK_BYTES)
        self._block = torch.frombuffer(self._buffer, dtype=torch.uint8)

    def send(self, frames: list[bytes]) -> None:
        """Send frames; none are a heartbeat. Raises RuntimeError."""
        payload = b"".join(_LENGTH.pack(len(frame)) + frame for frame in frames)
        if len(payload) <= BLOCK_BYTES - _LENGTH.size:
            self._buffer[_LENGTH.size : _LENGTH.size + len(payload)] = payload
            self._send_block(len(payload))
        else:
            self._send_block(len(payload))
            self._bodies.send(payload, self._peer)

    def send_goodbye(self) -> None:
        """Tell the peer that this was the last. Raises RuntimeError."""
        self._send_block(_GOODBYE)

    def receive(self) -> list[bytes] | None:
        """The next frames, or None when the peer said goodbye. Raises RuntimeError, and WireError on a bad payload."""
        self._blocks.recv([self._block], self._peer, _BLOCK_TAG).wait(self._patience)
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length == _GOODBYE:
            return None
        if length > _MAX_PAYLOAD_BYTES:
            raise WireError(f"the peer announced {length} bytes, at most {_MAX_PAYLOAD_BYTES} are allowed")
        if length <= BLOCK_BYTES - _LENGTH.size:
            return _split(bytes(self._buffer[_LENGTH.size : _LENGTH.size + length]))
        return _split(self._bodies.receive(length, self._peer))

    def interrupt(self) -> None:
        """End all waits of this lane, for good.

        A gloo wait cannot be cancelled, but one that times out breaks the connection and so ends all others.
        """
        with suppress(RuntimeError):
            self._bodies.group.abort()
        with suppress(RuntimeError):
            nothing = torch.empty(1, dtype=torch.uint8)
            self._blocks.recv([nothing], self._peer, _INTERRUPT_TAG).wait(timedelta(milliseconds=1))

    def _send_block(self, length: int) -> None:
        _LENGTH.pack_into(self._buffer, 0, length)
        self._blocks.send([self._block], self._peer, _BLOCK_TAG).wait(self._patience)


def _split(payload: bytes) -> list[bytes]:
    frames, offset = [], 0
    while len(payload) - offset >= _LENGTH.size:
        start = offset + _LENGTH.size
        offset = start + _LENGTH.unpack_from(payload, offset)[0]
        frames.append(payload[start:offset])
    if offset != len(payload):
        raise WireError("the peer sent a payload that ends amid a frame")
    return frames
