"""The first messages on a link: whether the two can work together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from amusd.errors import ConfigError, PeerFailedError, PeerLostError, PeerProtocolError, first_line
from amusd.protocol.messages import MAX_TEXT_LENGTH, PROTOCOL_VERSION, Failed, Hello
from amusd.transport.base import Transport
from amusd.types import Role

LOOK_SECONDS = 0.5
"""How often the peer's process is checked, and how long its last words may take."""

Ending: TypeAlias = Callable[[float], "str | None"]
"""How the peer's process ended, as one line, if it has within so many seconds (0 polls) and that is known."""


def unknown(_timeout: float) -> None:
    """The `Ending` of a process that nobody here has started."""


class Handshake:
    """Exchanges `own` for the peer's over `link`. The draft, which connects, speaks first."""

    def __init__(self, link: Transport, own: Hello, timeout_seconds: float) -> None:
        """Raises `PeerLostError`."""
        self.link = link
        self._own = own
        self._timeout_seconds = timeout_seconds
        self._deadline = time.monotonic() + timeout_seconds
        if own.role is Role.DRAFT:
            link.send(own)

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline; may be negative."""
        return self._deadline - time.monotonic()

    def receive(self, timeout: float) -> Hello | None:
        """The peer's `Hello`, or None when it has not come within `timeout` seconds (0 polls).

        Raises `ConfigError` when the two do not fit or the peer reports one, `PeerFailedError` when the peer failed
        otherwise, `PeerProtocolError` when it begins with anything else, `PeerLostError` when it is gone or late.
        """
        message = self.link.receive(timeout)
        if isinstance(message, Hello):
            if self._own.role is Role.TARGET:
                self.link.send(self._own)
            _check(self._own, message)
            return message
        if isinstance(message, Failed):
            if message.kind == ConfigError.__name__:
                raise ConfigError(told_by(message))
            raise PeerFailedError(f"the {message.role.value} failed while starting: {told_by(message)}")
        if message is not None:
            raise PeerProtocolError(f"{type(message).__name__} before Hello")
        if self.seconds_left <= 0:
            if self.link.frames.refusal is not None:
                raise ConfigError(f"no peer within {self._timeout_seconds:g} seconds: {self.link.frames.refusal}")
            raise PeerLostError(f"no Hello from the peer within {self._timeout_seconds:g} seconds")
        return None


def await_hello(link: Transport, own: Hello, timeout_seconds: float, ending: Ending = unknown) -> Hello:
    """Exchange `own` for the peer's, while its process lives. Raises as `Handshake.receive`."""
    handshake = Handshake(link, own, timeout_seconds)
    end: str | None = None
    while end is None:
        end = ending(0.0)  # first, so that what was said before the end is still taken in
        try:
            if (peer := handshake.receive(min(max(handshake.seconds_left, 0.0), LOOK_SECONDS))) is not None:
                return peer
        except PeerLostError:
            end = end or ending(LOOK_SECONDS)
            if end is None:
                raise
    raise PeerLostError(f"no Hello from the peer: {end}")


def failure_report(error: BaseException) -> Failed:
    """The first line of the error, cut for a message."""
    kind, text = type(error).__name__, first_line(error)
    if isinstance(error, ConfigError):
        kind = ConfigError.__name__
    elif not text.startswith(kind):
        text = f"{kind}: {text}"
    return Failed(Role.DRAFT, kind, text.encode(errors="replace").decode()[:MAX_TEXT_LENGTH])


def told_by(failure: Failed) -> str:
    """The peer's words about its failure, without control characters."""
    return "".join(character if character.isprintable() or character in "\n\t" else "?" for character in failure.text)


def _check(own: Hello, peer: Hello) -> None:
    if peer.protocol_version != PROTOCOL_VERSION:
        raise ConfigError(f"the peer speaks protocol version {peer.protocol_version}, this side {PROTOCOL_VERSION}")
    if peer.role is own.role:
        raise PeerProtocolError(f"two workers play the {own.role.value}")
    target, draft = (own, peer) if own.role is Role.TARGET else (peer, own)
    if target.incarnation != 0 or draft.incarnation < 1:
        raise PeerProtocolError(f"a {peer.role.value} cannot be in its life {peer.incarnation}")
    # A drafter that only looks tokens up works with any tokenizer, and one that takes the target's ids says its hash.
    if draft.tokenizer_hash and draft.tokenizer_hash != target.tokenizer_hash:
        raise ConfigError(
            f"drafter={', '.join(sorted({*draft.drafters, *draft.tree_drafters}))}: its tokenizer differs from the "
            "target's; put the target's files at the same path on the draft's machine, or use drafter=ngram"
        )
