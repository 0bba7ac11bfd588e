"""Small shared types: the words of the project that are not messages. Standard library only."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

TopLogprobs: TypeAlias = tuple[tuple[int, float], ...]
"""The most likely tokens at one position with their log-probabilities under the target, most likely first."""


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
    """It does not answer; the target goes on alone."""
    AWAY = "away"
    """It is lost, and a next one is looked for."""
    FAILED = "failed"
    """It is lost for good."""
    NONE = "none"


class TokenSource(str, enum.Enum):
    """Who said a token first, which depends on timing; the token does not."""

    TARGET = "target"
    CANDIDATE = "candidate"
    """An accepted candidate of the likeliest path."""
    ALTERNATIVE = "alternative"
    """An accepted candidate beside the likeliest path."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer as it arrives."""

    token_id: int
    text: str
    """Text to show now: empty while a character or a possible stop string is incomplete."""
    logprob: float | None = None
    """Log-probability under the target alone, with `SamplingParams.logprobs` or `top_logprobs`."""
    top_logprobs: TopLogprobs = ()
    """The most likely tokens in its place, with `SamplingParams.top_logprobs`."""
    source: TokenSource = TokenSource.TARGET


class FinishReason(str, enum.Enum):
    """Why a generation ended (the values of `finish_reason`)."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    """The caller stopped reading, or the run was interrupted."""
