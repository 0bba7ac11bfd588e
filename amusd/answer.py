"""The answers of an engine: one that is read token by token, and the whole of a finished one.

Any thread may read, close or drop an answer. `Turns` sees to it that one thread computes at a time, for all answers.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from typing_extensions import Self

from amusd.errors import StateError
from amusd.runtime.target_sequence import Request, TargetSequence
from amusd.runtime.target_worker import TargetWorker
from amusd.sampling.stopping import AnswerText, Emission, StopChecker
from amusd.tracing.metrics import GenerationMetrics
from amusd.types import FinishReason, Mode, TokenSource, TopLogprobs


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer as it arrives."""

    token_id: int
    text: str
    """The text that can be shown now: empty while a character or a possible stop string is incomplete."""
    logprob: float | None = None
    """Log-probability under the target alone, with `SamplingParams.logprobs`."""
    top_logprobs: TopLogprobs = ()
    """The most likely tokens in its place under the target alone, with `SamplingParams.top_logprobs`."""
    source: TokenSource = TokenSource.TARGET
    """Who was first to say it."""


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
    """Log-probabilities of `token_ids` under the target alone; empty unless `SamplingParams.logprobs`."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """The most likely tokens in the place of each of `token_ids`; empty unless `SamplingParams.top_logprobs`."""

    def as_dict(self) -> dict[str, Any]:
        """The documented JSON, without `run_dir`; `logprobs` and `top_logprobs` only where they were asked for."""
        logprobs: dict[str, Any] = {"logprobs": list(self.logprobs)} if self.logprobs else {}
        if self.top_logprobs:
            logprobs["top_logprobs"] = [[list(pair) for pair in top] for top in self.top_logprobs]
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


CLOSE_SECONDS = 60.0
"""How long `Turns.close` waits for a pass that another thread computes."""


class Turns:
    """Has a worker compute the answers, as many at a time as it takes, in the order in which they were queued.

    A thread that waits for a token computes the next step, which is one of all answers at work: the tokens of the
    others are kept for their readers. So a slow reader holds up no other one. An answer that is no longer referenced is
    ended.
    """

    def __init__(self, worker: TargetWorker) -> None:
        self._worker = worker
        self._lock = threading.RLock()
        self._queue: deque[weakref.ref[Answer]] = deque()
        """Those that wait for the worker to have room."""
        self._queue_lock = threading.Lock()
        self._at_work: dict[TargetSequence, weakref.ref[Answer]] = {}
        self._in_use = False
        """The thread that has the lock is inside the worker."""
        self._is_closed = False
        self._release: Callable[[], None] | None = None
        """The rest of `close`."""
        self._pid = os.getpid()

    @property
    def num_running(self) -> int:
        """Answers at work; for any thread."""
        return len(self._at_work)

    @property
    def num_waiting(self) -> int:
        """Answers that wait for their turn; for any thread."""
        answers = [reference() for reference in tuple(self._queue)]
        return sum(answer is not None and not answer.is_over for answer in answers)

    def check(self) -> None:
        """Raise `StateError` if the engine is closed, or belongs to the process that this one was forked from."""
        if self._is_closed:
            raise StateError("the engine is closed: launch another one")
        if os.getpid() != self._pid:
            raise StateError(f"the engine belongs to process {self._pid}, not to a fork of it: launch another one here")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have the worker to oneself. Raises `StateError` as `check` does, or from a signal handler amid a pass."""
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
        """Have the answer computed when its turn comes. Idempotent; waits for no pass. Raises as `check` does."""
        self.check()
        with self._queue_lock:
            if not answer.is_queued:
                answer.is_queued = True
                self._queue.append(weakref.ref(answer))

    def advance(self, answer: Answer) -> None:
        """Unless another thread has just brought `answer` on, compute a step of all answers whose turn it is."""
        with self.alone():
            if not answer.has_news:
                self._step()

    def step(self) -> bool:
        """Compute a step of all answers whose turn it is; return whether any is left, at work or in the queue.

        Use this to read many answers without waiting for one.
        """
        with self.alone():
            self._step()
            return bool(self._at_work or self._queue)

    def look_after_draft(self) -> None:
        """Notice a draft that is lost, and take the next one, while there is nothing to compute. Waits for neither."""
        with self.alone():
            self._worker.client.take(0.0)
            self._worker.client.look_for_next()

    def end_unwanted(self, *, wait: bool = True) -> None:
        """End the answers that were closed; those that this thread computes (this is its signal handler) end later.

        Without `wait`, those that another thread computes end with its next step.
        """
        if os.getpid() == self._pid and self._lock.acquire(blocking=wait):
            try:
                if not self._in_use:
                    self._end_unwanted()
            finally:
                self._lock.release()

    def close(self, release: Callable[[], None]) -> None:
        """Give no more turns, end all answers, and call `release`.

        This waits for a pass that another thread computes. After `CLOSE_SECONDS`, and in a signal handler amid a pass,
        the rest is left to the thread that computes, at the end of its pass. In a fork nothing happens.
        """
        if os.getpid() != self._pid:
            return
        self._release, self._is_closed = release, True
        if self._lock.acquire(timeout=CLOSE_SECONDS):
            try:
                self._finish_closing()
            finally:
                self._lock.release()

    def _finish_closing(self) -> None:
        if self._release is None or self._in_use:
            return
        with ExitStack() as stack:  # all of it, whatever a part of it raises
            stack.callback(self._release)
            self._release = None
            self._queue.clear()
            while self._at_work:
                stack.callback(self._worker.end, self._at_work.popitem()[0])

    def _step(self) -> None:
        self._end_unwanted()
        self._admit()
        try:
            self._worker.step()
        except Exception as error:  # noqa: BLE001 - raised again, by whoever reads an answer
            self._fail_all(error)
        except BaseException:
            self._fail_all(StateError("the answer was interrupted"))
            raise
        self._hand_out()

    def _admit(self) -> None:
        while self._worker.has_room and self._queue:
            reference = self._queue.popleft()
            answer = reference()
            if answer is None or answer.is_over:
                continue
            try:
                self._at_work[answer.admit(self._worker)] = reference
            except Exception as error:  # noqa: BLE001 - raised again, by whoever reads the answer
                answer.fail(error)

    def _hand_out(self) -> None:
        for sequence, reference in tuple(self._at_work.items()):
            answer = reference()
            if answer is not None:
                answer.take(sequence)
            if sequence.is_over:
                del self._at_work[sequence]

    def _end_unwanted(self) -> None:
        """End those that were closed, or that nobody can read any more."""
        for sequence, reference in tuple(self._at_work.items()):
            answer = reference()
            if answer is None or answer.is_over:
                del self._at_work[sequence]
                self._worker.end(sequence)

    def _fail_all(self, error: Exception) -> None:
        """End all answers at work: what the pass has left of them is unknown."""
        while self._at_work:
            sequence, reference = self._at_work.popitem()
            if (answer := reference()) is not None:
                answer.fail(error)
            self._worker.end(sequence)


@dataclass(eq=False, repr=False)
class Answer:
    """Iterates over the tokens of one answer; afterwards `generation` holds the whole. `close` ends it early.

    Nothing is computed before it is queued: with its first token asked for, or with `Engine.submit`.
    """

    _request: Request
    _stop: StopChecker
    _text: AnswerText
    _kind: Callable[..., Generation]
    """`Generation` with what the request decides."""
    _turns: Turns
    _tokens: list[Token] = field(default_factory=list)
    _unread: deque[Token] = field(default_factory=deque)
    _generation: Generation | None = None
    _error: Exception | None = None
    is_queued: bool = False
    is_over: bool = False
    """Nothing more will be computed."""
    all_tokens_at: float | None = None
    """When its last token came (`time.perf_counter`): what may follow is the draft's counts."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token:
        """Raises `StateError` when the engine was closed before the answer was finished, or the answer interrupted."""
        while True:
            is_over = self.is_over  # first: the last tokens come before it is set
            if self._unread:
                try:
                    return self._unread.popleft()
                except IndexError:  # another thread was faster
                    continue
            if self._error is not None:
                raise self._error
            if is_over:
                raise StopIteration
            self._turns.enqueue(self)
            self._turns.advance(self)

    @property
    def num_unread(self) -> int:
        """Tokens that can be read at once."""
        return len(self._unread)

    @property
    def has_news(self) -> bool:
        """A token can be read, or the answer is over."""
        return bool(self._unread) or self.is_over

    @property
    def generation(self) -> Generation:
        """The finished answer. Raises `StateError` before the last token was read."""
        if self._generation is None:
            raise StateError("the answer is not finished: read all its tokens first")
        return self._generation

    def result(self) -> Generation:
        """Read all that is left, and return the finished answer. Raises as reading does."""
        for _ in self:
            pass
        return self.generation

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The text read so far."""
        return tuple(token.token_id for token in self._read)

    @property
    def text(self) -> str:
        """What has been shown so far."""
        return "".join(token.text for token in self._read)

    def close(self) -> None:
        """End the answer now; the draft is told to forget it. Idempotent."""
        self.is_over = True
        self._turns.end_unwanted()
        self._tokens = self._read
        self._unread.clear()

    def cancel(self) -> None:
        """End the answer before its next pass, without waiting; its tokens so far can be read. Idempotent."""
        self.is_over = True
        self._turns.end_unwanted(wait=False)

    def admit(self, worker: TargetWorker) -> TargetSequence:
        """Begin the answer; for `Turns`."""
        return worker.admit(self._request, self._stop)

    def fail(self, error: Exception) -> None:
        """Raise `error` behind the tokens that can be read; for `Turns`."""
        self._error = error
        self.is_over = True

    def take(self, sequence: TargetSequence) -> None:
        """Keep the tokens of the last step; for `Turns`. An error is raised where the answer is read."""
        try:
            for emission in sequence.take():
                self._take(emission)
            if not sequence.is_over:
                return
            if sequence.error is not None:
                raise sequence.error
            self._generation = self._kind(
                text=self._text.text,
                token_ids=tuple(token.token_id for token in self._tokens),
                finish_reason=sequence.ended_by,
                metrics=sequence.metrics,
                sequence_id=sequence.sequence_id,
                logprobs=tuple(token.logprob for token in self._tokens if token.logprob is not None),
                top_logprobs=tuple(token.top_logprobs for token in self._tokens if token.top_logprobs),
            )
            self.is_over = True
        except Exception as error:  # noqa: BLE001 - raised again, by whoever reads the answer
            self.fail(error)

    @property
    def _read(self) -> list[Token]:
        return self._tokens[: len(self._tokens) - len(self._unread)]

    def _take(self, emission: Emission) -> None:
        parts = zip_longest(emission.token_ids, emission.logprobs, emission.top_logprobs, emission.sources)
        for number, (token_id, logprob, top_logprobs, source) in enumerate(parts, start=1):
            text = self._text.push(token_id)
            if emission.finish_reason is not None and number == len(emission.token_ids):
                text += self._text.finish(emission.finish_reason)
                self.all_tokens_at = time.perf_counter()
            token = Token(token_id, text, logprob, top_logprobs or (), source)
            self._tokens.append(token)
            self._unread.append(token)
