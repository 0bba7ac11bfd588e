"""The errors that this package raises on purpose. The tree says whose fault each of them is.

    AmusdError
    +-- ConfigError            the user's: a key, a value, a model or a combination that cannot work, a package that is
    |                          missing, or an output that fails
    |   +-- ContextLengthError a prompt leaves no room for an answer
    |   +-- NotFiniteError     a model's logits are not numbers: its weights are damaged, or overflow in its dtype
    +-- PeerError              the other process's: it failed, and said why in one line
    |   +-- PeerProtocolError  it sent what the protocol forbids; nothing was changed by the message
    |   +-- PeerLostError      it is gone, or silent beyond the deadline
    |       +-- RankLostError  it shared this one's model
    +-- StateError             the caller's: asked of an engine or an answer when it cannot be had
    +-- DeviceError            the device's: it is there but does not answer

An `AssertionError` is ours: an invariant of docs/protocol.md does not hold, or a rollback went wrong.

The command line turns a `ConfigError` into one line and exit code 2. Exit code 1 comes with one line for a `PeerError`,
and with a traceback for a `PeerProtocolError` and everything else, which are bugs.
"""

from __future__ import annotations


class AmusdError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(AmusdError):
    """The message is one complete line for the user."""


class ContextLengthError(ConfigError):
    """A prompt leaves no room for an answer."""


class NotFiniteError(ConfigError):
    """The largest logit of a row is NaN or infinite."""


class PeerError(AmusdError):
    """The other process failed, misbehaved or vanished. The message is one line."""


class PeerProtocolError(PeerError):
    """The peer sent what the protocol forbids, or bytes that are no frame of this version. They changed nothing."""


class PeerLostError(PeerError):
    """The peer closed the link, or stopped reading or answering."""


class RankLostError(PeerLostError):
    """Another rank of the same model is gone or silent."""


class StateError(AmusdError, RuntimeError):
    """An engine or an answer is closed, unfinished or interrupted."""


class DeviceError(AmusdError):
    """A device did not finish its work within the deadline."""


def first_line(error: BaseException) -> str:
    """One line of an error's message, with the error's type if the message needs it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    line = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    if isinstance(error, (AmusdError, OSError, RuntimeError, ValueError)) and line:
        return line
    return f"{type(error).__name__}: {line}".removesuffix(": ")
