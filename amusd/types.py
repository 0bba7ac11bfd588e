"""Small shared types: the words of the project that are not messages. Standard library only."""

from __future__ import annotations

import enum
from typing import TypeAlias

TopLogprobs: TypeAlias = tuple[tuple[int, float], ...]
"""The most likely tokens at one position with their log-probabilities under the target alone, most likely first."""


class Role(str, enum.Enum):
    """Which of the two workers a process is."""

    TARGET = "target"
    DRAFT = "draft"


class Mode(str, enum.Enum):
    """The schedule under which the same models, sessions and acceptance rule run."""

    AUTOREGRESSIVE = "autoregressive"
    """The target alone, one token a pass."""
    SYNCHRONOUS = "synchronous"
    """Draft and target take turns: propose `num_speculative_tokens`, verify them, repeat."""
    ASYNCHRONOUS = "asynchronous"
    """The draft runs ahead without pause; the target verifies what has arrived."""


class DraftPresence(str, enum.Enum):
    """Whether an engine has a draft now."""

    PRESENT = "present"
    SILENT = "silent"
    """It does not answer, and the target goes on alone."""
    AWAY = "away"
    """It is lost, and the next one is looked for."""
    FAILED = "failed"
    """It is lost, and no other one is looked for."""
    NONE = "none"
    """The engine was made without one."""


class TokenSource(str, enum.Enum):
    """Who was first to say a token of an answer. Which one it is depends on timing; the token does not."""

    TARGET = "target"
    """The target's own."""
    CANDIDATE = "candidate"
    """An accepted candidate of the likeliest path, or of a chain."""
    ALTERNATIVE = "alternative"
    """An accepted candidate beside the likeliest path."""


class FinishReason(str, enum.Enum):
    """Why a generation ended (the values of `finish_reason`)."""

    EOS = "eos"
    """The target produced an end-of-sequence token."""
    STOP = "stop"
    """A stop string was completed."""
    LENGTH = "length"
    """`max_new_tokens` or the context length was reached."""
    ABORTED = "aborted"
    """The caller stopped reading, or the run was interrupted."""
