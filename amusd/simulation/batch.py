"""Several answers decoded together: the devices they share, what joint work costs, and when a pass begins.

A `Device` does one thing at a time, for several sequences together. Joint work takes in all sequences of a group that
have asked by the time it begins; groups take turns. Work for one sequence alone (a prefill, a rollback) comes first, so
that no sequence is left out of the next joint work because of it.

A `Gathering` says when the target's next pass begins. The policy of each sequence says whether it would verify or wait.
The pass begins once no sequence is busy with the last one and no more than half would wait; in lock step (synchronous
blocks, windows) once none would. It takes in all sequences: those that would have waited with the candidates at hand.
So one sequence whose draft starts anew holds up no other, and where most do, the pass waits for their candidates.

An `Intake` hands out the answers: the slot that is free takes the next.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Generic, Protocol, TypeVar

from amusd.simulation.clock import BEGINNING, PARKED, Parked, Process, VirtualClock, Worker
from amusd.simulation.cost import Costs
from amusd.simulation.tokens import Answer
from amusd.tracing.tally import Tally


@dataclass(frozen=True, slots=True)
class PassPart:
    """A sequence's share of a target pass."""

    num_candidates: int
    """Alternatives included."""
    draft_works: bool


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass over all of them."""

    ns: int
    host_ns: int
    """Work of the target's host behind the pass, once for all sequences."""
    num_rows: int
    num_sequences: int


@dataclass(frozen=True, slots=True)
class PassPrice:
    """What a pass of the target costs."""

    costs: Costs
    has_draft: bool
    random: Random

    def __call__(self, parts: Sequence[PassPart]) -> Pass:
        """Each sequence has a row for its last token and one for each candidate."""
        num_candidates = sum(part.num_candidates for part in parts)
        draft_works = any(part.draft_works for part in parts)
        ns = self.costs.pass_ns(num_candidates, draft_works, self.random, num_sequences=len(parts))
        host_ns = self.costs.host.when(self.has_draft).draw(self.random)
        return Pass(ns, host_ns, num_candidates + len(parts), len(parts))


@dataclass(frozen=True, slots=True)
class StepPart:
    """A sequence's share of a draft step."""

    num_tokens: int
    """One behind the other; of a tree: nodes, all at once."""
    is_tree: bool
    target_works: bool
    random: Random
    """For the times; that of the first one counts."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step over all of them."""

    ns: int
    num_rows: int
    num_sequences: int


@dataclass(frozen=True, slots=True)
class StepPrice:
    """What a step of the draft costs."""

    costs: Costs

    def __call__(self, parts: Sequence[StepPart]) -> Step:
        """Chains: as many tokens one behind the other as the longest part has, each for the sequences that go on."""
        costs, random = self.costs, parts[0].random
        target_works = any(part.target_works for part in parts)
        nums = [part.num_tokens for part in parts]
        if parts[0].is_tree:
            ns = costs.tree_step_ns(sum(nums), target_works, random, num_sequences=len(parts))
        else:
            going_on = (sum(num > index for num in nums) for index in range(max(nums)))
            ns = sum(costs.step_ns(1, target_works, random, num_sequences=num) for num in going_on)
        return Step(ns, sum(nums), len(nums))


class Timed(Protocol):
    """What joint work comes to."""

    @property
    def ns(self) -> int:
        """How long it takes."""
        ...


Part = TypeVar("Part")
Joint = TypeVar("Joint", bound=Timed)


class Device(Generic[Part, Joint]):
    """The device of one role."""

    def __init__(self, clock: VirtualClock, rank: int, price: Callable[[Sequence[Part]], Joint]) -> None:
        """`rank`: when its workers act at equal times; `price`: what parts cost together."""
        self._clock = clock
        self._rank = rank
        self._price = price
        self._alone: deque[tuple[Worker, int]] = deque()
        self._parts: list[tuple[object, Worker, Part]] = []
        self._done: Joint
        self._running = False
        self._called = False

    @property
    def works(self) -> bool:
        """At work, or about to be."""
        return self._running or bool(self._alone or self._parts)

    def alone(self, worker: Worker, ns: int) -> Process:
        """Work for one sequence; what takes no time does not wait either."""
        if ns:
            self._alone.append((worker, ns))
            self._call()
            yield PARKED

    def together(self, worker: Worker, part: Part, group: object = None) -> Generator[Parked, None, Joint]:
        """Take part in the next joint work of `group`; returns when that is done."""
        self._parts.append((group, worker, part))
        self._call()
        yield PARKED
        return self._done

    def _call(self) -> None:
        """Begin as soon as everybody has done what they do at this time."""
        if not (self._running or self._called):
            self._called = True
            self._clock.schedule(self._clock.now_ns, BEGINNING, self._begin)

    def _begin(self) -> None:
        self._called = False
        if self._alone:
            worker, ns = self._alone.popleft()
            self._run(ns, [worker])
        else:
            turn = self._parts[0][0]
            taken = [(worker, part) for group, worker, part in self._parts if group is turn]
            self._parts = [waiting for waiting in self._parts if waiting[0] is not turn]
            self._done = self._price([part for _, part in taken])
            self._run(self._done.ns, [worker for worker, _ in taken])

    def _run(self, ns: int, workers: Sequence[Worker]) -> None:
        self._running = True
        self._clock.schedule(self._clock.now_ns + ns, self._rank, functools.partial(self._end, workers))

    def _end(self, workers: Sequence[Worker]) -> None:
        self._running = False
        for worker in workers:
            worker.resume()
        if self._alone or self._parts:
            self._call()


class Gathering:
    """The sequences that one pass takes in. With a single slot, the pass begins when its policy says so."""

    def __init__(self, clock: VirtualClock, num_slots: int, *, in_lock_step: bool) -> None:
        self._clock = clock
        self._num_slots = num_slots
        self._in_lock_step = in_lock_step
        self._workers: dict[int, Worker] = {}
        self._waits: dict[int, bool] = {}
        self._called: set[int] = set()

    def enter(self, sequence_id: int, worker: Worker) -> None:
        """No pass begins without it from now on."""
        self._workers[sequence_id] = worker

    def leave(self, sequence_id: int) -> None:
        """It is complete. The others may have waited for it alone."""
        del self._workers[sequence_id]
        self._begin_if_agreed()

    def decide(self, sequence_id: int, *, waits: bool) -> bool:
        """What its policy says now. Returns whether the pass begins; else its worker is to listen until it is woken."""
        if sequence_id not in self._called:
            self._waits[sequence_id] = waits
            self._begin_if_agreed(sequence_id)
        if sequence_id not in self._called:
            return False
        self._called.remove(sequence_id)
        return True

    def _begin_if_agreed(self, asking: int | None = None) -> None:
        """Where a slot is free, once everybody has done what they do at this time: an answer may be about to enter."""
        if len(self._workers) == self._num_slots:
            self._call_all(asking)
        elif self._is_agreed():
            self._clock.schedule(self._clock.now_ns, BEGINNING, self._call_all)

    def _is_agreed(self) -> bool:
        if not self._workers or len(self._waits) < len(self._workers):
            return False
        return sum(self._waits.values()) <= (0 if self._in_lock_step else len(self._workers) // 2)

    def _call_all(self, asking: int | None = None) -> None:
        if self._is_agreed():
            self._waits.clear()
            self._called.update(self._workers)
            for sequence_id, worker in self._workers.items():
                if sequence_id != asking:
                    worker.wake()


@dataclass(frozen=True, slots=True)
class Throughput:
    """What the slots delivered until the first of them found no further answer.

    After that the batch shrinks, and passes over few sequences would be counted as those of a full batch.
    """

    num_slots: int
    num_tokens: int
    slot_ns: int
    """Time that answers spent in slots, up to the last of these tokens; not what passes between two answers."""

    @property
    def tokens_per_second(self) -> float:
        """What all slots deliver together."""
        return self.num_slots * self.num_tokens * 1e9 / self.slot_ns

    def over(self, other: Throughput) -> float:
        """How many times as much as `other`."""
        mine = self.num_slots * self.num_tokens * other.slot_ns
        return mine / (other.num_slots * other.num_tokens * self.slot_ns)


class Intake:
    """Hands out the answers in order: whichever slot is free takes the next."""

    def __init__(self, clock: VirtualClock, answers: Sequence[Answer], num_slots: int) -> None:
        self._clock = clock
        self._answers = answers
        self._num_slots = num_slots
        self._counts: list[Tally] = []
        self._is_over = False
        self.throughput: Throughput | None = None
        """None until a slot has found no further answer."""

    @property
    def counts(self) -> tuple[Tally, ...]:
        """The counts of all answers that have begun, in their order."""
        return tuple(self._counts)

    def take(self, num_prompt_tokens: int) -> tuple[int, Answer, Tally] | None:
        """The next answer, the id of its sequence, and its counts, which begin now; None: there is none left."""
        index = len(self._counts)
        if index == len(self._answers):
            if not self._is_over:
                self._is_over = True
                self._clock.schedule(self._clock.now_ns, BEGINNING, self._measure)
            return None
        self._counts.append(Tally(self._clock.now_ns, num_prompt_tokens))
        return index + 1, self._answers[index], self._counts[index]

    def _measure(self) -> None:
        """Measure, once all slots have done what they do at this time."""
        begun = [counts for counts in self._counts if counts.num_tokens]
        slot_ns = sum(counts.last_ns - counts.start_ns for counts in begun)
        self.throughput = Throughput(self._num_slots, sum(counts.num_tokens for counts in begun), slot_ns)
