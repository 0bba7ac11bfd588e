"""The interface of a link, which moves messages and does not know what they mean."""

from __future__ import annotations

import logging
import math
import os
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Protocol

from amusd.clock import MONOTONIC
from amusd.errors import PeerProtocolError
from amusd.logs import logger
from amusd.protocol import wire
from amusd.protocol.messages import Message

MAX_QUEUED_MESSAGES = 10_000
"""A peer with more unread messages counts as lost."""
SPIN_SECONDS = 0.002
"""How long a receiver polls before it sleeps: about the time of a fast drafter's token."""
LOOK_SECONDS = 0.001
"""Interval at which a busy end checks that its peer is still there."""
give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))
"""Yields the core, which the other end may need."""
CLOSED = "this end of the link is closed"
CLOSED_BY_PEER = "the peer closed the link"


class Link(Protocol):
    """One end of a two-way link to exactly one peer, as workers use it.

    Guarantees of every implementation (`tests/transport/test_contract.py` runs them all):

    * The connecting end sends first: the listening end sends nothing before a message has come.
    * Order is kept per direction. A message arrives once or not at all, and never altered.
    * Sending never blocks on the peer: it queues or raises.
    * Nothing waits without a deadline.
    * A malformed frame, or one of another session, is counted and dropped: a bad frame never ends a worker.
    * One thread at a time uses an end.
    """

    address: str = "memory://"
    """Address of the listening end: `tcp://HOST:PORT`, or `shm`, `ipc`, `gloo` or `nccl` with `://PATH`."""
    refusal: str | None = None
    """One line: why a connection was refused."""

    @abstractmethod
    def send(self, message: Message) -> None:
        """Queue a message. Raises `PeerLostError` when the peer is gone or has stopped reading."""

    @abstractmethod
    def receive(self, timeout: float) -> Message | None:
        """The next message, or None after `timeout` seconds (0 polls).

        Raises `PeerLostError` once the peer is gone and all its messages are received, and `ConfigError` for a
        message of another protocol version.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent; never raises; later uses raise `PeerLostError`."""

    def drop(self) -> None:
        """Close at once, without waiting until all is sent."""
        self.close()

    def has_room(self, num_bytes: int) -> bool:  # noqa: ARG002 - some links count messages, not bytes
        """Whether `num_bytes` can be queued before the peer reads more. A loss raises nothing here."""
        return True


class Transport(Link):
    """A `Link` that moves frames of bytes."""

    num_rejected = 0
    """Frames that were dropped, and connections that were refused."""
    answer_to_others: Message | None = None
    """A ZeroMQ link's answer to all but its peer; None: no answer."""
    clock = MONOTONIC
    delay_seconds = 0.0
    """Least time from sending to receipt, between processes of one machine, which share a clock."""

    def __init__(self, address: str, nonce: int | None) -> None:
        """`nonce`: 64-bit number of the session; frames with another one are dropped. None: that of the first frame."""
        self.address = address
        self._nonce = nonce
        self._next: Message | None = None
        """The next message, while it is not due; later ones wait in the link."""
        self._due = 0.0
        """When `_next` may be received, in seconds of the clock."""

    def send(self, message: Message) -> None:
        """See `Link`."""
        self.send_frame(wire.encode(message, self._nonce or 0, self.clock.now_ns()))

    def receive(self, timeout: float) -> Message | None:
        """See `Link`."""
        deadline = self.clock.now() + timeout
        while self._next is None:
            frame = self.receive_frame(max(0.0, deadline - self.clock.now()))
            self._next = None if frame is None else self.accept(frame)
            if self._next is None and self.clock.now() >= deadline:
                return None
        if self.delay_seconds:
            self.clock.sleep(max(0.0, min(self._due, deadline) - self.clock.now()))
            if self._due > deadline:
                return None
        message, self._next = self._next, None
        return message

    @abstractmethod
    def send_frame(self, frame: bytes) -> None:
        """Queue bytes. Raises as `send`."""

    @abstractmethod
    def receive_frame(self, timeout: float) -> bytes | None:
        """The next bytes, or None after `timeout` seconds (0 polls). Raises `PeerLostError` as `receive`."""

    @abstractmethod
    def close(self) -> None:
        """See `Link`."""

    def accept(self, frame: bytes) -> Message | None:
        """The message of a frame, or None when the frame is dropped. Raises `ConfigError` for another version's."""
        try:
            nonce, sent_ns, message = wire.decode(frame)
        except PeerProtocolError as error:
            self.reject(str(error))
            return None
        if self._nonce is None:
            self._nonce = nonce
        if nonce != self._nonce:
            self.reject("it belongs to another session")
            return None
        self._due = min(sent_ns / 1e9, self.clock.now()) + self.delay_seconds  # another machine's clock may be ahead
        return message

    def reject(self, reason: str) -> None:
        """Count a dropped frame or connection."""
        # only the first is a warning: a flood must not fill the log
        level = logging.DEBUG if self.num_rejected else logging.WARNING
        self.num_rejected += 1
        logger.log(level, "%s: refused: %s", self.address, reason)


def spin_then_sleep(has_news: Callable[[], bool], sleep: Callable[[int], object], deadline: float) -> bool:
    """Poll for news until `deadline` (monotonic seconds), for at most `SPIN_SECONDS`; then sleep. True if it slept.

    Waking up costs more than a message. Each poll first yields the core to the other end. `sleep` gets milliseconds, of
    an hour at most (32 bits).
    """
    until = min(deadline, time.monotonic() + SPIN_SECONDS)
    while time.monotonic() < until:
        give_way()
        if has_news():
            return False
    sleep(math.ceil(min(max(deadline - time.monotonic(), 0.0), 3600.0) * 1000))
    return True
