"""When the target's next pass begins: the rule by which the sequences of a batch agree.

Each one's policy says whether it would verify or wait. The pass begins once nobody is busy with the last one any more
and no more than half would wait; in lock step (synchronous blocks, windows) once nobody would. It takes in everybody:
for those who would have waited what is at hand, or else only the token that a pass always makes. So one sequence whose
draft starts anew holds nobody up, and where most do, the pass waits for their candidates.
"""

from __future__ import annotations

from amusd.simulation.clock import BEGINNING, VirtualClock, Worker


class Gathering:
    """Of the sequences that one pass takes in. With a single slot, the pass begins when its policy says so."""

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
