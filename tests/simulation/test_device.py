"""What several sequences share: who takes part in joint work, and what comes before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from amusd.simulation.batch import Device
from amusd.simulation.clock import DRAFT, Busy, Process, VirtualClock, Worker


@dataclass(frozen=True)
class Sum:
    ns: int


def price(parts: Sequence[int]) -> Sum:
    """Ten for all, and one for each row."""
    return Sum(10 + sum(parts))


@dataclass
class Bench:
    """Workers beside one device, and when each of them is done."""

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        self.device = Device[int, Sum](self.clock, DRAFT, price)
        self.done: list[tuple[str, int]] = []

    def add(self, name: str, *tasks: tuple[str, int]) -> None:
        """`tasks`: ("rest" or "alone", ns) or (name of a group, rows), one after another."""
        worker = Worker(self.clock, DRAFT)

        def process() -> Process:
            for kind, number in tasks:
                if kind == "rest":
                    yield Busy(number)
                elif kind == "alone":
                    yield from self.device.alone(worker, number)
                else:
                    yield from self.device.together(worker, number, kind)
                if kind != "rest":
                    self.done.append((name, self.clock.now_ns))

        worker.start(process())


def test_all_who_have_asked_share_one_piece_of_work() -> None:
    bench = Bench()
    bench.add("a", ("together", 1))
    bench.add("b", ("together", 2))
    bench.clock.run()
    assert bench.done == [("a", 13), ("b", 13)]


def test_who_comes_later_waits_for_the_next_one() -> None:
    bench = Bench()
    bench.add("a", ("together", 1), ("together", 1))
    bench.add("b", ("rest", 5), ("together", 2))
    bench.clock.run()
    assert bench.done == [("a", 11), ("b", 24), ("a", 24)]


def test_groups_take_turns() -> None:
    bench = Bench()
    bench.add("a", ("together", 1))
    bench.add("b", ("in turns", 2), ("in turns", 2))
    bench.add("c", ("together", 3), ("together", 3))
    bench.clock.run()
    assert bench.done == [("a", 14), ("c", 14), ("b", 26), ("c", 39), ("b", 51)]


def test_what_one_needs_for_itself_comes_before_joint_work_and_one_after_another() -> None:
    bench = Bench()
    bench.add("a", ("together", 1))
    bench.add("b", ("alone", 4), ("together", 2))
    bench.add("c", ("alone", 3))
    bench.clock.run()
    assert bench.done == [("b", 4), ("c", 7), ("a", 20), ("b", 20)]


def test_what_takes_no_time_waits_for_nothing() -> None:
    bench = Bench()
    bench.add("a", ("together", 1))
    bench.add("b", ("rest", 5), ("alone", 0))
    bench.clock.run()
    assert bench.done == [("b", 5), ("a", 11)]


@pytest.mark.parametrize(
    ("time_ns", "works"), [(0, True), (10, True), (11, False), (14, False), (15, True), (27, False)]
)
def test_it_works_while_somebody_has_it_work(time_ns: int, works: bool) -> None:
    bench, seen = Bench(), []
    bench.add("a", ("together", 1), ("rest", 4), ("together", 2))
    bench.clock.schedule(time_ns, DRAFT + 1, lambda: seen.append(bench.device.works))
    bench.clock.run()
    assert seen == [works]
