"""The first messages on a link, which tell whether its two ends can work together."""

from __future__ import annotations

import time

from amusd.errors import ConfigError, PeerError, PeerLostError, PeerProtocolError, first_line
from amusd.protocol.messages import MAX_TEXT_LENGTH, Failed, Hello
from amusd.transport.base import Transport


def await_hello(link: Transport, own: Hello, timeout_seconds: float) -> None:
    """Exchange `own` for the peer's. The draft, which connects, speaks first. Raises as `receive_hello`."""
    if own.incarnation:
        link.send(own)
    deadline = time.monotonic() + timeout_seconds
    while receive_hello(link, own, deadline, max(deadline - time.monotonic(), 0.0)) is None:
        pass


def receive_hello(link: Transport, own: Hello, deadline: float, timeout: float) -> Hello | None:
    """Wait up to `timeout` seconds for the peer's `Hello`; return it, or None. The target answers with its `own`.

    Raises `ConfigError` if the two do not fit, `PeerError` or `ConfigError` if the peer reports one, `PeerLostError` if
    it is gone or has not come by `deadline` (monotonic seconds), `PeerProtocolError` if it begins otherwise.
    """
    message = link.receive(timeout)
    if isinstance(message, Hello):
        if not own.incarnation:
            link.send(own)
        _check(own, message)
        return message
    if isinstance(message, Failed):
        raise reported(message, "the draft failed while starting")
    if message is not None:
        raise PeerProtocolError(f"{type(message).__name__} before Hello")
    if time.monotonic() >= deadline:
        if link.refusal is not None:
            raise ConfigError(f"no peer in time: {link.refusal}")
        raise PeerLostError("no Hello from the peer within startup_timeout_seconds")
    return None


def failure_report(error: BaseException) -> Failed:
    """The first line of the error, cut for a message."""
    kind, text = type(error).__name__, first_line(error)
    if isinstance(error, ConfigError):
        kind = ConfigError.__name__
    elif not text.startswith(kind):
        text = f"{kind}: {text}"
    return Failed(kind, text.encode(errors="replace").decode()[:MAX_TEXT_LENGTH])


def reported(failure: Failed, who: str) -> ConfigError | PeerError:
    """The error that a peer has reported: the user's mistake in its words, any other behind `who`."""
    text = told_by(failure)
    return ConfigError(text) if failure.kind == ConfigError.__name__ else PeerError(f"{who}: {text}")


def told_by(failure: Failed) -> str:
    """The peer's words about its failure, without control characters."""
    return "".join(character if character.isprintable() or character in "\n\t" else "?" for character in failure.text)


def _check(own: Hello, peer: Hello) -> None:
    target, draft = (peer, own) if own.incarnation else (own, peer)
    # A drafter that only looks tokens up works with any tokenizer, and one that takes the target's ids says its hash.
    if draft.tokenizer_hash and draft.tokenizer_hash != target.tokenizer_hash:
        raise ConfigError(
            f"drafter={', '.join(sorted(draft.drafters))}: its tokenizer differs from the "
            "target's; put the target's files at the same path on the draft's machine, or use drafter=ngram"
        )
