"""Answers on their way into the slots of a batch, and what the batch delivers while every slot has one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from amusd.simulation.clock import BEGINNING, VirtualClock
from amusd.simulation.tokens import Answer
from amusd.tracing.tally import Tally


@dataclass(frozen=True, slots=True)
class Throughput:
    """What the slots delivered until the first of them found no further answer.

    Behind that the batch shrinks, and passes over few sequences would be counted as those of a full batch.
    """

    num_slots: int
    num_tokens: int
    slot_ns: int
    """Time that answers spent in slots, up to the last of these tokens; not what passes between two answers."""

    @property
    def tokens_per_second(self) -> float:
        """Of all slots together."""
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
        """Of all answers that have begun, in their order."""
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
        """Once all slots have done what they do at this time."""
        begun = [counts for counts in self._counts if counts.num_tokens]
        slot_ns = sum(counts.last_ns - counts.start_ns for counts in begun)
        self.throughput = Throughput(self._num_slots, sum(counts.num_tokens for counts in begun), slot_ns)
