"""The errors that this package raises on purpose, by whose fault they are.

    AmusdError
    +-- ConfigError            The user's: a key, a value, a model or a combination cannot work, a package is missing,
    |   |                      or an output cannot be written.
    |   +-- ContextLengthError A prompt leaves no room for an answer.
    |   +-- NotFiniteError     A model's logits are not numbers: its weights are damaged, or overflow in its dtype.
    +-- PeerError              The other process's: it failed, and said why in one line.
    |   +-- PeerProtocolError  It sent a message that the protocol forbids. The message changed nothing.
    |   +-- PeerLostError      It has ended, or was silent beyond the deadline.
    |       +-- RankLostError  It was a rank of the same model.
    +-- StateError             The caller's: the engine or answer is closed, unfinished or interrupted.
    +-- DeviceError            The device's: too late, or cannot capture.

An `AssertionError` is a bug of this package, or of a user's drafter whose rollback failed.

The command line reports a `ConfigError` in one line and exits with 2. All other errors exit with 1: a `PeerError` is
reported in one line, but a `PeerProtocolError`, like any unexpected error, is a bug and gets a traceback.
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
    """The other process failed. The message is one line."""


class PeerProtocolError(PeerError):
    """The peer sent a forbidden message, or bytes that are no frame. No state was changed."""


class PeerLostError(PeerError):
    """The peer closed the link, or stopped reading or answering."""


class RankLostError(PeerLostError):
    """Another rank of the same model is gone or silent."""


class StateError(AmusdError, RuntimeError):
    """An engine or an answer is closed, unfinished or interrupted."""


class DeviceError(AmusdError):
    """A device did not finish in time, or cannot capture a pass."""


def first_line(error: BaseException) -> str:
    """One line of an error's message, with the error's type if the message needs it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    line = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    if isinstance(error, (AmusdError, OSError, RuntimeError, ValueError)) and line:
        return line
    return f"{type(error).__name__}: {line}".removesuffix(": ")
