"""The answers of an engine: read token by token, or finished."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import Self

from amusd.answer.scheduler import Scheduler
from amusd.errors import StateError
from amusd.runtime.target_sequence import Request, TargetSequence
from amusd.sampling.stopping import StopChecker
from amusd.tracing.metrics import GenerationMetrics
from amusd.types import FinishReason, Mode, Token, TopLogprobs

_DOCUMENTED = ("text", "token_ids", "finish_reason", "mode", "policy", "drafter", "seed")


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    mode: Mode
    policy: str | None
    drafter: str | None
    seed: int
    metrics: GenerationMetrics
    sequence_id: int
    """Names the answer in the events of both workers."""
    logprobs: tuple[float, ...] = ()
    """Log-probabilities under the target alone; empty unless asked for."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """The most likely tokens in each place; empty unless `SamplingParams.top_logprobs`."""

    def as_dict(self) -> dict[str, Any]:
        """The documented JSON without `run_dir`; log-probabilities only if asked for."""
        values = {name: getattr(self, name) for name in _DOCUMENTED}
        values |= {name: value for name in ("logprobs", "top_logprobs") if (value := getattr(self, name))}
        document: dict[str, Any] = json.loads(json.dumps(values))
        return {**document, "metrics": self.metrics.as_dict()}


@dataclass(eq=False, repr=False)
class Answer:
    """Iterates over the tokens of one answer; afterwards `generation` holds the whole. `cancel` ends it early.

    Computing begins when its first token is asked for, or with `Engine.submit`. One thread at a time may read it; any
    thread may cancel or drop it.
    """

    request: Request
    stop: StopChecker
    _kind: Callable[..., Generation]
    _turns: Scheduler
    _tokens: list[Token] = field(default_factory=list)
    _num_read: int = 0
    _generation: Generation | None = None
    _error: Exception | None = None
    on_news: Callable[[], None] = lambda: None
    """Called by the computing thread when a token can be read or nothing more will come."""
    is_queued: bool = False
    is_over: bool = False
    all_tokens_at: float | None = None
    """When its last token came (`time.perf_counter`); only the draft's counts may follow."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token:
        """Raises `StateError` when the engine was closed, or the answer interrupted."""
        while True:
            is_over = self.is_over  # first: the last tokens come before it is set
            if self._num_read < len(self._tokens):
                self._num_read += 1
                return self._tokens[self._num_read - 1]
            if self._error is not None:
                raise self._error
            if is_over:
                raise StopIteration
            self._turns.advance(self)

    def read_available(self) -> list[Token]:
        """Read the tokens that need not be waited for."""
        tokens = self._tokens[self._num_read :]
        self._num_read += len(tokens)
        return tokens

    @property
    def has_news(self) -> bool:
        """A token can be read, or the answer is over."""
        return self._num_read < len(self._tokens) or self.is_over

    @property
    def generation(self) -> Generation:
        """The finished answer. Raises `StateError` before the last token was read."""
        if self._generation is None:
            raise StateError("the answer is not finished: read all its tokens first")
        return self._generation

    def result(self) -> Generation:
        """Read the rest, and return the finished answer. Raises as reading does."""
        for _ in self:
            pass
        return self.generation

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens read so far."""
        return tuple(token.token_id for token in self._tokens[: self._num_read])

    @property
    def text(self) -> str:
        """The text read so far."""
        return "".join(token.text for token in self._tokens[: self._num_read])

    def cancel(self) -> None:
        """End the answer before its next pass, without waiting; its tokens can be read. Idempotent."""
        self.is_over = True

    # For `Scheduler`

    def fail(self, error: Exception) -> None:
        """Raise `error` behind the tokens that can be read."""
        if not self.is_over:
            self._error = error
            self.is_over = True
            self.on_news()

    def take(self, sequence: TargetSequence) -> None:
        """Show the tokens of the last step. Errors are raised where the answer is read."""
        try:
            self._tokens = sequence.tokens
            if sequence.finish_reason is not None and self.all_tokens_at is None:
                self.all_tokens_at = time.perf_counter()
            if sequence.error is not None:
                raise sequence.error
            if sequence.is_over:
                self._finish(sequence)
            if self.has_news:
                self.on_news()
        except Exception as error:  # noqa: BLE001 - raised again, by whoever reads the answer
            self.fail(error)

    def _finish(self, sequence: TargetSequence) -> None:
        self._generation = self._kind(
            text="".join(token.text for token in self._tokens),
            token_ids=tuple(token.token_id for token in self._tokens),
            finish_reason=sequence.ended_by,
            metrics=sequence.metrics,
            sequence_id=sequence.sequence_id,
            logprobs=tuple(token.logprob for token in self._tokens if token.logprob is not None),
            top_logprobs=tuple(token.top_logprobs for token in self._tokens if token.top_logprobs),
        )
        self.is_over = True
