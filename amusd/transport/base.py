"""The seam between the workers and a link. A link moves messages; it knows nothing of what they mean."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from amusd.errors import WireError
from amusd.protocol.messages import Message
from amusd.protocol.wire import decode

logger = logging.getLogger(__name__)

MAX_QUEUED_MESSAGES = 10_000
"""Messages that may wait for a peer that does not read; one more and it counts as lost."""


class Transport(Protocol):
    """One end of a two-way link to exactly one peer.

    Guarantees of every implementation (`tests/transport/test_contract.py` runs them all):

    * Order is kept per direction. A message arrives once or not at all, and never altered.
    * `send` never blocks on the peer: it queues or raises.
    * Nothing waits without a deadline.
    * What arrives malformed, or belongs to another session, is counted in `num_rejected` and dropped: a bad frame never
      ends a worker.
    * One thread at a time uses an end.
    """

    @property
    def num_rejected(self) -> int:
        """Frames dropped because they were malformed or of another session."""
        ...

    @property
    def sent_ns(self) -> int:
        """When the message that `receive` returned last was sent: nanoseconds of its sender's monotonic clock."""
        ...

    def send(self, message: Message) -> None:
        """Queue a message. Raises `PeerLostError` when the peer is known to be gone or has stopped reading."""
        ...

    def receive(self, timeout: float) -> Message | None:
        """The next message, or None when none came within `timeout` seconds (0 polls).

        Raises `PeerLostError` once the peer is known to be gone and everything it sent has been handed over.
        """
        ...

    def close(self) -> None:
        """Release everything. Idempotent; never raises; later calls of `send` and `receive` raise `PeerLostError`."""
        ...


class Listener(Transport, Protocol):
    """The end that the other one connects to."""

    @property
    def address(self) -> str:
        """Where to connect to, with the port or path that was picked."""
        ...


@runtime_checkable
class Guarded(Protocol):
    """A link that can tell a peer that never came from one that was turned away."""

    @property
    def refusal(self) -> str | None:
        """Why there is no peer although somebody tried, as one line; None where there is one, or nobody did."""
        ...


@dataclass(frozen=True)
class Rendezvous:
    """What the others have to be told to find the target: the draft its link, further ranks of it the first one."""

    address: str
    """`shm://PATH`, `ipc://PATH`, or `tcp`, `gloo` or `nccl` with `://HOST:PORT`."""
    nonce: int
    """64-bit number of the session; frames that carry another one are dropped."""
    ranks: str | None = None
    """Where the first of several ranks of the target awaits the others; None: there are none."""


class FrameFilter:
    """Turns frames into messages; counts and drops what is malformed or of another session."""

    def __init__(self, nonce: int) -> None:
        self._nonce = nonce
        self.num_rejected = 0
        self.sent_ns = 0
        """Of the frame that was accepted last."""

    def accept(self, frame: bytes) -> Message | None:
        """The message of a frame, or None when the frame is dropped."""
        try:
            nonce, sent_ns, message = decode(frame)
        except WireError as error:
            self.reject(str(error))
            return None
        if nonce != self._nonce:
            self.reject("it belongs to another session")
            return None
        self.sent_ns = sent_ns
        return message

    def reject(self, reason: str) -> None:
        """Count something that was dropped."""
        # the first one is news; a flood of them must not fill the log
        level = logging.DEBUG if self.num_rejected else logging.WARNING
        self.num_rejected += 1
        logger.log(level, "dropped a frame from the link: %s", reason)
