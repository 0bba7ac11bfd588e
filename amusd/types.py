"""Small types that all packages share. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

TopLogprobs: TypeAlias = tuple[tuple[int, float], ...]
"""The most likely tokens at one position with their log-probabilities under the target, most likely first."""

Role: TypeAlias = Literal["target", "draft"]
"""Which of the two workers a process is."""

Mode: TypeAlias = Literal["autoregressive", "synchronous", "asynchronous"]
"""The schedule under which the same models, sessions and acceptance rule run.

`autoregressive`: the target alone, one token a pass; `synchronous`: draft and target take turns: propose
`num_speculative_tokens`, verify them, repeat; `asynchronous`: the draft runs ahead without pause, and the target
verifies what has arrived.
"""

DraftPresence: TypeAlias = Literal["present", "silent", "away", "failed", "none"]
"""Whether an engine has a draft now.

`silent`: no answer, and the target goes on alone; `away`: the draft is lost, and the next draft is looked for;
`failed`: the draft is lost for good.
"""

TokenSource: TypeAlias = Literal["target", "candidate", "alternative"]
"""Which model proposed a token first. This depends on timing; the token does not.

`candidate`: the draft, on its likeliest path; `alternative`: the draft, beside that path.
"""

FinishReason: TypeAlias = Literal["eos", "stop", "length", "aborted"]
"""Why a generation ended. `aborted`: the caller stopped reading, or the run was interrupted."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer as it arrives."""

    token_id: int
    text: str
    """Text to show now: empty while a character or a possible stop string is incomplete."""
    logprob: float | None = None
    """Log-probability under the target alone, with `SamplingParams.logprobs` or `top_logprobs`."""
    top_logprobs: TopLogprobs = ()
    """The most likely tokens at its position, with `SamplingParams.top_logprobs`."""
    source: TokenSource = "target"
