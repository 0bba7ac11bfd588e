"""The first messages on a link: who is there, and whether the two can work together."""

from __future__ import annotations

import time

from amusd.errors import ConfigError, PeerFailedError, PeerLostError, PeerProtocolError
from amusd.protocol.messages import PROTOCOL_VERSION, Failed, Hello
from amusd.transport.base import Guarded, Transport
from amusd.types import Role


def await_hello(link: Transport, own: Hello, timeout_seconds: float) -> Hello:
    """Send `own`, wait for the peer's, and check that they fit.

    Raises `ConfigError` (one line, for the user) when the models or the keys of the link do not fit, `PeerFailedError`
    when the peer failed while loading, `PeerLostError` when nothing comes within the deadline.
    """
    link.send(own)
    deadline = time.monotonic() + timeout_seconds
    while (left := deadline - time.monotonic()) > 0:
        message = link.receive(min(left, 1.0))
        if isinstance(message, Hello):
            _check(own, message)
            return message
        if isinstance(message, Failed):
            raise PeerFailedError(f"the {message.role.value} failed while starting: {told(message)}")
        if message is not None:
            raise PeerProtocolError(f"{type(message).__name__} before Hello")
    if isinstance(link, Guarded) and link.refusal is not None:
        raise ConfigError(f"no peer within {timeout_seconds:g} seconds: {link.refusal}")
    raise PeerLostError(f"no Hello from the peer within {timeout_seconds:g} seconds")


def told(failure: Failed) -> str:
    """What the peer says of its failure, without characters that would do something to a terminal."""
    return "".join(character if character.isprintable() or character in "\n\t" else "?" for character in failure.text)


def _check(own: Hello, peer: Hello) -> None:
    if peer.protocol_version != PROTOCOL_VERSION:
        raise ConfigError(f"the peer speaks protocol version {peer.protocol_version}, this side {PROTOCOL_VERSION}")
    if peer.role is own.role:
        raise PeerProtocolError(f"two workers play the {own.role.value}")
    target, draft = (own, peer) if own.role is Role.TARGET else (peer, own)
    if target.incarnation != 0 or draft.incarnation < 1:
        raise PeerProtocolError(f"a {peer.role.value} cannot be in its life {peer.incarnation}")
    # A drafter that only looks tokens up has no tokenizer of its own, and works with any.
    if draft.tokenizer_hash and draft.tokenizer_hash != target.tokenizer_hash:
        raise ConfigError(
            "drafter: its tokenizer differs from the target's "
            f"({draft.tokenizer_hash[:12]} against {target.tokenizer_hash[:12]}); a pair must share one"
        )
