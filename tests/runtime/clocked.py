"""A clock that only a test moves, one end of a link that uses it, and a source of drafts with such links."""

from __future__ import annotations

from typing import Any

from amusd import clock
from amusd.child import Ended
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
    """True if it answers a target's hello."""

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
            self.inbox.append(DraftHello(message.incarnation, "", ("test",), (), 7))

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


class Source:
    """Starts a draft where there is none, which loads for `load_seconds`."""

    can_repeat = is_here = True

    def __init__(self, clock: Clock) -> None:
        self.process: Any = self
        self.clock, self._ready_ns = clock, 0
        self.load_seconds = 0.0
        self.has_ended = self.cuts_links = self.is_deaf = False
        self.answers = True
        self.links: list[Link] = []
        self.num_started = self.num_dropped = 0

    def ended(self, _timeout: float, /) -> Ended | None:
        return Ended(7, -9) if self.process and self.has_ended else None

    def start(self) -> bool:
        if self.process and not self.has_ended:
            return False
        self.has_ended = False
        self.num_started += 1
        self._ready_ns = self.clock.ns + round(self.load_seconds * 1e9)
        return True

    def connect(self) -> Any:
        if self.is_deaf or self.clock.ns < self._ready_ns:
            return None
        self.links.append(Link(self.clock))
        self.links[-1].is_lost, self.links[-1].answers = self.cuts_links, self.answers
        return self.links[-1]

    def drop(self) -> None:
        self.num_dropped += 1
        self.has_ended = True

    def stop(self) -> None:
        pass
