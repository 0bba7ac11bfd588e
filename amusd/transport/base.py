"""The seam between the workers and a link. A link moves messages; it knows nothing of what they mean."""

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
"""Messages that may wait for a peer that does not read; one more and it counts as lost."""
SPIN_SECONDS = 0.002
"""How long a receiver looks before it sleeps: about a fast drafter's token, so that waits in mid-answer end before."""


class Transport(Protocol):
    """One end of a two-way link to exactly one peer.

    Guarantees of every implementation (`tests/transport/test_contract.py` runs them all):

    * Order is kept per direction. A message arrives once or not at all, and never altered.
    * `send` never blocks on the peer: it queues or raises.
    * Nothing waits without a deadline.
    * What arrives malformed, or belongs to another session, is counted in `frames.num_rejected` and dropped: a bad
      frame never ends a worker.
    * One thread at a time uses an end.
    """

    address: str
    """The address of the listening end, with the port or path that was picked."""
    frames: FrameCodec
    """The codec of its frames, and what is known of them."""

    def send(self, message: Message) -> None:
        """Queue a message. Raises `PeerLostError` when the peer is known to be gone or has stopped reading."""
        ...

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes can be queued before the peer has read more. False says nothing of a loss."""
        ...

    def receive(self, timeout: float) -> Message | None:
        """The next message, or None when none came within `timeout` seconds (0 polls).

        Raises `PeerLostError` once the peer is known to be gone and everything it sent has been handed over.
        """
        ...

    def close(self) -> None:
        """Release everything. Idempotent; never raises; later calls of `send` and `receive` raise `PeerLostError`."""
        ...


@dataclass(frozen=True)
class Rendezvous:
    """The draft's way to the target."""

    address: str
    """`shm://PATH`, `ipc://PATH`, or `tcp`, `gloo` or `nccl` with `://HOST:PORT`."""
    nonce: int
    """64-bit number of the session; frames that carry another one are dropped."""


class FrameCodec:
    """Messages of one session to frames and back; counts and drops frames that are malformed or of another session."""

    def __init__(self, nonce: int) -> None:
        self._nonce = nonce
        self.num_rejected = 0
        """Frames that were dropped."""
        self.sent_ns = 0
        """The time when the last accepted frame was sent: nanoseconds of its sender's monotonic clock."""
        self.refusal: str | None = None
        """Why there is no peer although one tried to connect, as one line; None where there is one, or none tried."""

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
        """The next good message of the frames that `take` hands over, or None. A flood of bad ones ends it too."""
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
    """Look for news at most `SPIN_SECONDS`, and until `deadline` (monotonic seconds); returns whether there is any.

    Being woken costs both ends more than a link does. Each look gives the core away first: the other end may need it.
    """
    until = min(deadline, time.monotonic() + SPIN_SECONDS)
    while time.monotonic() < until:
        os.sched_yield()
        if has_news():
            return True
    return False


def milliseconds_until(deadline: float) -> int:
    """How long to poll until then (monotonic seconds); no longer than an hour, since polls take 32 bits."""
    return math.ceil(min(max(deadline - time.monotonic(), 0.0), 3600.0) * 1000)
