"""A clock that only a test moves, and one end of a link that lives by it."""

from __future__ import annotations

from typing import Any

from amusd import clock
from amusd.errors import PeerLostError
from amusd.protocol.messages import DraftHello, Message, TargetHello
from amusd.transport import base


class Clock(clock.Clock):
    def __init__(self) -> None:
        self.ns = 0

    def now_ns(self) -> int:
        return self.ns

    def sleep(self, seconds: float) -> None:
        self.pass_by(seconds)

    def pass_by(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9)


class Link(base.Link):
    answers = True
    """Whether it says hello to a target that does."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.inbox: list[Message] = []
        self.sent: list[tuple[float, Message]] = []
        self.peer: Link | None = None
        self.is_lost = self.is_closed = False

    def send(self, message: Message) -> None:
        if self.is_lost:
            raise PeerLostError("the link is cut")
        self.sent.append((self._clock.ns / 1e9, message))
        if self.peer is not None:
            self.peer.inbox.append(message)
        if isinstance(message, TargetHello) and self.answers:
            self.inbox.append(DraftHello(message.incarnation, "", ("test",), 7))

    def receive(self, timeout: float) -> Message | None:
        if self.is_lost:
            raise PeerLostError("the link is cut")
        if self.inbox:
            return self.inbox.pop(0)
        self._clock.pass_by(timeout)
        return None

    def close(self) -> None:
        self.is_lost = self.is_closed = True

    def messages(self, kind: type[Message]) -> list[Any]:
        return [message for _, message in self.sent if isinstance(message, kind)]
