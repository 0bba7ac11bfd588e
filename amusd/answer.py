"""Answers of an engine, and the scheduler that computes all of them, one thread at a time."""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import Self

from amusd.errors import StateError
from amusd.runtime.target_sequence import TargetSequence
from amusd.runtime.target_worker import TargetWorker
from amusd.runtime.verifier import Request
from amusd.sampling.stopping import StopChecker
from amusd.tracing.metrics import GenerationMetrics
from amusd.types import FinishReason, Mode, Token, TopLogprobs

_CLOSED = "the engine is closed: launch another one"
_INTERRUPTED = "the answer was interrupted"
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
    """Its number in the events of both workers."""
    logprobs: tuple[float, ...] = ()
    """Log-probabilities under the target alone; empty unless asked for."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """The most likely tokens in each place; empty unless `SamplingParams.top_logprobs`."""

    def as_dict(self) -> dict[str, Any]:
        """The documented JSON without `run_dir`; log-probabilities only if asked for."""
        values = {name: getattr(self, name) for name in _DOCUMENTED}
        values |= {name: value for name in ("logprobs", "top_logprobs") if (value := getattr(self, name))}
        return {**json.loads(json.dumps(values)), "metrics": self.metrics.as_dict()}


@dataclass(eq=False, repr=False)
class Answer:
    """Iterator over one answer's tokens; afterwards `generation` holds the whole. `cancel` ends the answer early.

    `Engine.submit` or the first read begins it. One thread at a time may read an answer; any may cancel or drop it.
    """

    request: Request
    stop: StopChecker
    _make: Callable[..., Generation]
    _scheduler: Scheduler
    _tokens: list[Token] = field(default_factory=list)
    _num_read: int = 0
    _generation: Generation | None = None
    _error: Exception | None = None
    on_news: Callable[[], None] = lambda: None
    """Called, in any thread, when a token can be read or the answer is over."""
    is_queued: bool = False
    is_over: bool = False
    all_tokens_at: float | None = None
    """`time.perf_counter` at the last token; only the draft's counts may follow."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token:
        """Raises `StateError` when the engine was closed, or the answer interrupted."""
        while True:
            is_over = self.is_over  # read first: it is set after the last tokens
            if self._num_read < len(self._tokens):
                self._num_read += 1
                return self._tokens[self._num_read - 1]
            if self._error is not None:
                raise self._error
            if is_over:
                raise StopIteration
            self._scheduler.advance(self)

    def read_available(self) -> list[Token]:
        """Read the tokens that are there, without waiting."""
        tokens = self._tokens[self._num_read :]
        self._num_read += len(tokens)
        return tokens

    @property
    def has_news(self) -> bool:
        """Whether a token can be read or the answer is over."""
        return self._num_read < len(self._tokens) or self.is_over

    @property
    def generation(self) -> Generation:
        """The finished answer. Raises what reading raises, or `StateError` before the end and after `cancel`."""
        if self._generation is None:
            why = "was cancelled" if self.is_over else "is not finished: read all its tokens first"
            raise self._error or StateError(f"the answer {why}")
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
        if not self.is_over:
            self.is_over = True
            self.on_news()

    def fail(self, error: Exception) -> None:
        """End the answer; reading raises `error` after the tokens that are there."""
        if not self.is_over:
            self._error, self.is_over = error, True
            self.on_news()

    def take(self, sequence: TargetSequence) -> None:
        """Update after a step of `sequence`. The sequence's error is raised where the answer is read."""
        try:
            self._tokens = sequence.tokens
            if sequence.finish_reason is not None and self.all_tokens_at is None:
                self.all_tokens_at = time.perf_counter()
            if sequence.error is not None:
                raise sequence.error
            if sequence.is_over:
                self._generation = self._make(
                    text="".join(token.text for token in self._tokens),
                    token_ids=tuple(token.token_id for token in self._tokens),
                    finish_reason=sequence.ended_by,
                    metrics=sequence.metrics,
                    sequence_id=sequence.sequence_id,
                    logprobs=tuple(token.logprob for token in self._tokens if token.logprob is not None),
                    top_logprobs=tuple(token.top_logprobs for token in self._tokens if token.top_logprobs),
                )
                self.is_over = True
            if self.has_news:
                self.on_news()
        except Exception as error:  # noqa: BLE001 - raised again where the answer is read
            self.fail(error)


class Scheduler:
    """Admits queued answers in order, as many at a time as the worker has room for.

    A thread that waits computes the next step of all answers: no reader delays another. Unreferenced answers end.
    """

    def __init__(self, worker: TargetWorker) -> None:
        self._worker = worker
        self._lock = threading.RLock()
        """Held by the thread that computes."""
        self._in_use = False
        """True while the worker is used: the lock cannot stop a signal handler of the same thread."""
        self._queue: deque[weakref.ref[Answer]] = deque()
        self._at_work: dict[TargetSequence, weakref.ref[Answer]] = {}
        self._is_closed = False
        self._release: Callable[[], None] | None = None
        self._pid = os.getpid()

    @property
    def num_waiting(self) -> int:
        """Number of queued answers. Any thread may ask."""
        return sum((answer := reference()) is not None and not answer.is_over for reference in tuple(self._queue))

    def check(self) -> None:
        """Raise `StateError` if the engine is closed, or in a fork of its process."""
        if self._is_closed:
            raise StateError(_CLOSED)
        if os.getpid() != self._pid:
            raise StateError(f"the engine belongs to process {self._pid}, not to a fork of it: launch another one here")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Use the worker alone. Raises `StateError` as `check`, and in a signal handler during a pass."""
        self.check()
        with self._lock:
            self.check()
            if self._in_use:
                raise StateError("the engine computes a pass in this thread: a signal handler cannot use it")
            self._in_use = True
            try:
                yield
            finally:
                self._in_use = False
                self._finish_closing()

    def enqueue(self, answer: Answer) -> None:
        """Queue an answer. Idempotent; does not wait. Raises as `check`."""
        if not answer.is_queued:
            answer.is_queued = True
            self._queue.append(weakref.ref(answer))
        self.check()  # last, since `close` may have emptied the queue before

    def advance(self, answer: Answer) -> None:
        """Queue an answer, and compute a step unless another thread has just advanced the answer."""
        self.enqueue(answer)
        with self.alone():
            if not answer.has_news:
                self._step()

    def step(self) -> bool:
        """Compute a step for all answers; return whether any is left. If none is, look for the next draft."""
        with self.alone():
            self._step()
            if not self._at_work:
                self._worker.client.take(0.0)
                self._worker.client.look_for_next()
            return bool(self._at_work or self._queue)

    def close(self, release: Callable[[], None]) -> None:
        """End all answers, and call `release`; in a fork do nothing.

        Waits for another thread's pass. In a signal handler during a pass, closing takes effect after that pass.
        """
        if os.getpid() != self._pid:
            return
        self._is_closed, self._release = True, release  # in this order: see `enqueue`
        with self._lock:
            self._finish_closing()

    def _finish_closing(self) -> None:
        if self._release is None or self._in_use:
            return
        release, self._release = self._release, None
        try:
            while self._queue:
                if (answer := self._queue.popleft()()) is not None:
                    answer.fail(StateError(_CLOSED))
            self._fail_all(StateError(_CLOSED))
        finally:
            release()

    def _step(self) -> None:
        self._end_unwanted()
        self._admit()
        try:
            self._worker.step()
        except Exception as error:  # noqa: BLE001 - raised again where an answer is read
            self._fail_all(error)
        except BaseException:
            self._fail_all(StateError(_INTERRUPTED))
            raise
        for sequence, reference in tuple(self._at_work.items()):
            if (answer := reference()) is not None:
                answer.take(sequence)
            if sequence.is_over:
                del self._at_work[sequence]

    def _admit(self) -> None:
        while self._worker.has_room and self._queue:
            reference = self._queue.popleft()
            if (answer := reference()) is None or answer.is_over:
                continue
            try:
                self._at_work[self._worker.admit(answer.request, answer.stop)] = reference
            except Exception as error:  # noqa: BLE001 - raised again where the answer is read
                answer.fail(error)
                self._end_unwanted()
            except BaseException:
                answer.fail(StateError(_INTERRUPTED))
                raise

    def _end_unwanted(self) -> None:
        for sequence in dict.fromkeys([*self._at_work, *self._worker.sequences]):
            reference = self._at_work.get(sequence, lambda: None)  # None: the admission failed
            if (answer := reference()) is None or answer.is_over:
                self._at_work.pop(sequence, None)
                self._worker.end(sequence)

    def _fail_all(self, error: Exception) -> None:
        while self._at_work:
            sequence, reference = self._at_work.popitem()
            if (answer := reference()) is not None:
                answer.fail(error)
            self._worker.end(sequence)
