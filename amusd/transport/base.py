"""The interface of a link, which moves messages and does not know what they mean."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from amusd.errors import WireError
from amusd.protocol import wire
from amusd.protocol.messages import Message

logger = logging.getLogger(__name__)

MAX_QUEUED_MESSAGES = 10_000
"""A peer with more unread messages counts as lost."""
SPIN_SECONDS = 0.002
"""How long a receiver polls before it sleeps: about a fast drafter's token."""


class Transport(Protocol):
    """One end of a two-way link to exactly one peer.

    Guarantees of every implementation (`tests/transport/test_contract.py` runs them all):

    * The connecting end speaks first: the other one sends nothing before a message has come.
    * Order is kept per direction. A message arrives once or not at all, and never altered.
    * `send` never blocks on the peer: it queues or raises.
    * Nothing waits without a deadline.
    * What arrives malformed, or belongs to another session, is counted in `frames.num_rejected` and dropped: a bad
      frame never ends a worker.
    * One thread at a time uses an end.
    """

    address: str
    """Address of the listening end, with the port or path that was picked."""
    frames: FrameCodec

    def send(self, message: Message) -> None:
        """Queue a message. Raises `PeerLostError` when the peer is gone or has stopped reading."""
        ...

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes can be queued before the peer reads more; says nothing of a loss."""
        ...

    def receive(self, timeout: float) -> Message | None:
        """The next message, or None after `timeout` seconds (0 polls).

        Raises `PeerLostError` once the peer is gone and all that it sent was handed over.
        """
        ...

    def close(self) -> None:
        """Release everything. Idempotent; never raises; later calls of `send` and `receive` raise `PeerLostError`."""
        ...


@dataclass(frozen=True)
class Rendezvous:
    """The draft's way to the target."""

    address: str
    """`tcp://HOST:PORT`, or `shm`, `ipc`, `gloo` or `nccl` with `://PATH`."""
    nonce: int
    """64-bit number of the session; frames with another one are dropped."""


class FrameCodec:
    """Converts messages to frames and back; counts and drops frames that are malformed or of another session."""

    def __init__(self, nonce: int) -> None:
        self._nonce = nonce
        self.num_rejected = 0
        self.sent_ns = 0
        """When the last accepted frame was sent, on its sender's monotonic clock."""
        self.refusal: str | None = None
        """Why a peer that tried to connect was refused, as one line."""

    def encode(self, message: Message) -> bytes:
        """The frame of a message that is sent now. Raises ValueError when a field does not fit."""
        return wire.encode(message, self._nonce, time.monotonic_ns())

    def accept(self, frame: bytes) -> Message | None:
        """The message of a frame, or None when the frame is dropped."""
        try:
            nonce, sent_ns, message = wire.decode(frame)
        except WireError as error:
            self.reject(str(error))
            return None
        if nonce != self._nonce:
            self.reject("it belongs to another session")
            return None
        self.sent_ns = sent_ns
        return message

    def next_message(self, take: Callable[[], bytes | None]) -> Message | None:
        """The next good message of the frames that `take` hands over; None at the end, or in a flood of bad ones."""
        for _ in range(MAX_QUEUED_MESSAGES):
            frame = take()
            if frame is None:
                return None
            message = self.accept(frame)
            if message is not None:
                return message
        return None

    def reject(self, reason: str) -> None:
        """Count something that was dropped."""
        # the first one is news; a flood of them must not fill the log
        level = logging.DEBUG if self.num_rejected else logging.WARNING
        self.num_rejected += 1
        logger.log(level, "dropped a frame from the link: %s", reason)


def spin(has_news: Callable[[], bool], deadline: float) -> bool:
    """Poll for news until `deadline` (monotonic seconds), for at most `SPIN_SECONDS`; returns whether there is any.

    Being woken costs more than a message. Each poll yields the core first, which the other end may need.
    """
    until = min(deadline, time.monotonic() + SPIN_SECONDS)
    while time.monotonic() < until:
        os.sched_yield()
        if has_news():
            return True
    return False


def milliseconds_until(deadline: float) -> int:
    """Poll timeout until then (monotonic seconds); at most an hour, since polls take 32 bits."""
    return math.ceil(min(max(deadline - time.monotonic(), 0.0), 3600.0) * 1000)
