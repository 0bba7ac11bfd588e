"""When a pass begins: by majority, or in lock step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from amusd.simulation.batch import Gathering
from amusd.simulation.clock import TARGET, Busy, Listen, Process, VirtualClock, Worker

READY, WAITS = False, True


def begins(
    decisions: Sequence[Sequence[tuple[int, bool]]], *, num_slots: int | None = None, in_lock_step: bool = False
) -> list[int | None]:
    """When the pass of each sequence begins, which is busy until it says something for the first time."""
    clock = VirtualClock()
    gathering = Gathering(clock, num_slots or len(decisions), in_lock_step=in_lock_step)
    began: dict[int, int] = {}

    def process(number: int, worker: Worker, said: Sequence[tuple[int, bool]]) -> Process:
        gathering.enter(number, worker)
        yield Busy(said[0][0])
        while not gathering.decide(number, waits=[waits for time_ns, waits in said if time_ns <= clock.now_ns][-1]):
            later = [time_ns for time_ns, _ in said if time_ns > clock.now_ns]
            yield Listen(later[0] - clock.now_ns if later else None)
        began[number] = clock.now_ns
        gathering.leave(number)

    for number, said in enumerate(decisions):
        worker = Worker(clock, TARGET)
        worker.start(process(number, worker, said))
    clock.run()
    return [began.get(number) for number in range(len(decisions))]


@pytest.mark.parametrize(
    ("decisions", "by_majority", "in_lock_step"),
    [
        ([[(0, READY)]], [0], [0]),
        ([[(0, WAITS), (7, READY)]], [7], [7]),
        ([[(0, READY)], [(0, WAITS), (7, READY)]], [0, 0], [7, 7]),
        ([[(0, READY)], [(0, WAITS), (7, READY)], [(0, WAITS), (9, READY)]], [7, 7, 7], [9, 9, 9]),
        ([[(4, READY)], [(0, READY)], [(0, READY)]], [4, 4, 4], [4, 4, 4]),  # busy until then
        ([[(0, WAITS)], [(0, WAITS)], [(0, READY)]], [None] * 3, [None] * 3),
    ],
)
def test_the_pass_takes_in_everybody_once_enough_are_ready(
    decisions: list[list[tuple[int, bool]]], by_majority: list[int | None], in_lock_step: list[int | None]
) -> None:
    assert begins(decisions) == by_majority
    assert begins(decisions, in_lock_step=True) == in_lock_step


def test_a_free_slot_is_not_waited_for_but_for_what_happens_at_the_same_time() -> None:
    assert begins([[(3, READY)], [(3, READY)]], num_slots=3) == [3, 3]
