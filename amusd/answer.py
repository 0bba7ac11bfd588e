"""What an engine gives back: an answer that is read token by token, and the whole of a finished one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from amusd.runtime.target_worker import Outcome
from amusd.sampling.answer_text import AnswerText
from amusd.sampling.stopping import Emission
from amusd.tracing.metrics import GenerationMetrics
from amusd.types import FinishReason, Mode


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer as it arrives."""

    token_id: int
    text: str
    """The text that can be shown now: empty while a character or a possible stop string is incomplete."""
    logprob: float | None = None
    """Log-probability under the target alone, with `SamplingParams.logprobs`."""


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
    """Of `token_ids`, under the target alone; empty unless `SamplingParams.logprobs`."""

    def as_dict(self) -> dict[str, Any]:
        """The documented JSON, without `run_dir`; `logprobs` only where they were asked for."""
        logprobs = {"logprobs": list(self.logprobs)} if self.logprobs else {}
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason.value,
            "mode": self.mode.value,
            "policy": self.policy,
            "drafter": self.drafter,
            "seed": self.seed,
            **logprobs,
            "metrics": self.metrics.as_dict(),
        }


class Answer:
    """Iterates over the tokens of one answer; afterwards `generation` holds the whole. `close` ends it early."""

    def __init__(
        self,
        steps: Generator[Emission, None, Outcome],
        text: AnswerText,
        make: Callable[[str, tuple[int, ...], tuple[float, ...], Outcome], Generation],
    ) -> None:
        self._steps = steps
        self._text = text
        self._make = make
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._generation: Generation | None = None
        self._tokens = self._run()

    def __iter__(self) -> Iterator[Token]:
        return self._tokens

    def __next__(self) -> Token:
        return next(self._tokens)

    @property
    def generation(self) -> Generation:
        """The finished answer. Raises `RuntimeError` before the last token was read."""
        if self._generation is None:
            raise RuntimeError("the answer is not finished: read all its tokens first")
        return self._generation

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What has been read so far."""
        return tuple(self._token_ids)

    @property
    def text(self) -> str:
        """What has been shown so far."""
        return self._text.text

    def close(self) -> None:
        """End the answer now; the draft is told to forget it."""
        self._tokens.close()
        self._steps.close()

    def _run(self) -> Generator[Token, None, None]:
        while True:
            try:
                emission = next(self._steps)
            except StopIteration as stop:
                self._generation = self._make(self._text.text, self.token_ids, tuple(self._logprobs), stop.value)
                return
            for index, token_id in enumerate(emission.token_ids, start=1):
                self._token_ids.append(token_id)
                text = self._text.push(token_id)
                if emission.finish_reason is not None and index == len(emission.token_ids):
                    text += self._text.finish(emission.finish_reason)
                logprob = emission.logprobs[index - 1] if emission.logprobs else None
                if logprob is not None:
                    self._logprobs.append(logprob)
                yield Token(token_id, text, logprob)
