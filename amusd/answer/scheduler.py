"""The order in which answers are computed, by one thread at a time."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from amusd.errors import StateError
from amusd.runtime.target_sequence import TargetSequence
from amusd.runtime.target_worker import TargetWorker

if TYPE_CHECKING:
    from amusd.answer import Answer

_CLOSED = "the engine is closed: launch another one"


class Scheduler:
    """Has a worker compute answers in the order in which they were queued, as many at a time as it takes.

    A waiting thread computes the next step of all answers at work, so a slow reader holds up no other. Unreferenced
    answers are ended.
    """

    def __init__(self, worker: TargetWorker) -> None:
        self._worker = worker
        self._lock = threading.RLock()
        """The thread that has it computes."""
        self._in_use = False
        """That thread is inside the worker: only a signal handler sees this with the lock."""
        self._queue: deque[weakref.ref[Answer]] = deque()
        self._at_work: dict[TargetSequence, weakref.ref[Answer]] = {}
        self._is_closed = False
        self._release: Callable[[], None] | None = None
        self._pid = os.getpid()

    @property
    def num_waiting(self) -> int:
        """Queued answers; for any thread."""
        answers = [reference() for reference in tuple(self._queue)]
        return sum(answer is not None and not answer.is_over for answer in answers)

    def check(self) -> None:
        """Raise `StateError` if the engine is closed, or of the process that this one was forked from."""
        if self._is_closed:
            raise StateError(_CLOSED)
        if os.getpid() != self._pid:
            raise StateError(f"the engine belongs to process {self._pid}, not to a fork of it: launch another one here")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Use the worker exclusively. Raises `StateError` as `check`, or in a signal handler amid a pass."""
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
        self.check()  # behind that: what comes after the queue was emptied is refused

    def advance(self, answer: Answer) -> None:
        """Queue an answer, and compute a step of all at work unless another thread has just brought it on."""
        self.enqueue(answer)
        with self.alone():
            if not answer.has_news:
                self._step()

    def step(self) -> bool:
        """Compute a step of all answers at work; return whether any is left.

        Use this to read many answers without waiting for one. Without any, a lost draft is noticed and replaced.
        """
        with self.alone():
            self._step()
            if not self._at_work:
                self._worker.client.take(0.0)
                self._worker.client.look_for_next()
            return bool(self._at_work or self._queue)

    def close(self, release: Callable[[], None]) -> None:
        """End all answers, and call `release`.

        Another thread's pass is waited for; in a signal handler amid a pass, all is left to its end. In a fork
        nothing happens.
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
                self._fail(self._queue.popleft(), StateError(_CLOSED))
            self._fail_all(StateError(_CLOSED))
        finally:
            release()

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
                self._at_work[self._worker.admit(answer.request, answer.stop)] = reference
            except Exception as error:  # noqa: BLE001 - raised again, by whoever reads the answer
                answer.fail(error)

    def _hand_out(self) -> None:
        for sequence, reference in tuple(self._at_work.items()):
            if (answer := reference()) is not None:
                answer.take(sequence)
            if sequence.is_over:
                del self._at_work[sequence]

    def _end_unwanted(self) -> None:
        for sequence, reference in tuple(self._at_work.items()):
            if (answer := reference()) is None or answer.is_over:
                del self._at_work[sequence]
                self._worker.end(sequence)

    def _fail_all(self, error: Exception) -> None:
        while self._at_work:
            sequence, reference = self._at_work.popitem()
            self._fail(reference, error)
            self._worker.end(sequence)

    def _fail(self, reference: weakref.ref[Answer], error: Exception) -> None:
        if (answer := reference()) is not None:
            answer.fail(error)
