"""The start of a pass over several sequences: by majority, or in lock step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import cast

import pytest

from amusd.policies.base import Decision, Policy, TargetView, Verify, Wait
from amusd.runner.model_runner import ModelRunner
from amusd.runtime.connection import Connection
from amusd.runtime.draft_client import DraftClient
from amusd.runtime.target_worker import TargetWorker
from amusd.runtime.verifier import Request
from amusd.sampling.stopping import StopChecker
from amusd.simulation.clock import Direction, VirtualTime
from amusd.simulation.cost import NOTHING, Costs, Duration
from amusd.simulation.simulator import ScriptedModel
from amusd.tracing.events import Event
from amusd.tracing.recorder import Recorder

NEVER = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyAt(Policy):
    """A policy that waits for this many nanoseconds."""

    time_ns: int
    is_block: bool

    def decide(self, view: TargetView) -> Decision:
        left_ns = self.time_ns - round(view.waited_seconds * 1e9)
        return Wait(left_ns / 1e9, worth=math.inf if self.is_block else 1.0) if left_ns > 0 else Verify(0)


def begins(times_ns: Sequence[int], *, in_lock_step: bool = False) -> list[int]:
    """Start times of the first pass of each sequence."""
    clock = VirtualTime(Direction(NOTHING, Random(1)), Direction(NOTHING, Random(1)))
    costs = Costs(passes={0: Duration.of_ms(1.0)}, draft_token=Duration.of_ms(1.0))
    model = ScriptedModel(clock, costs, Random(1), prompt_length=1, width=8, has_draft=True)
    events: list[Event] = []
    recorder = Recorder("target", clock=clock.target_clock)
    recorder.listeners = (events.append,)
    client = DraftClient(recorder, Connection(clock.target_link, 1))
    worker = TargetWorker(cast("ModelRunner", model), recorder, client, len(times_ns))
    for time_ns in times_ns:
        policy = ReadyAt(time_ns=time_ns, is_block=in_lock_step)
        request = Request(prompt=(1,), max_length=9, policy=policy, drafter="none", max_silence_seconds=100.0)
        worker.admit(request, StopChecker((), (), 8, str))
    worker.step()
    passes = [event for event in events if event.name == "target_pass"]
    assert [event.sequence_id for event in passes] == list(range(1, len(times_ns) + 1))
    return [event.start_ns for event in passes]


@pytest.mark.parametrize(
    ("times_ns", "by_majority", "in_lock_step"),
    [
        ([0], 0, 0),
        ([7], 7, 7),
        ([0, 7], 0, 7),
        ([0, 7, 9], 7, 9),
        ([4, 0, 0], 0, 4),
        ([7, 7, 0, 0], 0, 7),
        ([9, 7, 5, 0], 5, 9),
        ([0, 0, NEVER], 0, NEVER),
    ],
)
def test_the_pass_takes_in_all_sequences_once_enough_are_ready(
    times_ns: list[int], by_majority: int, in_lock_step: int
) -> None:
    assert begins(times_ns) == [by_majority] * len(times_ns)
    assert begins(times_ns, in_lock_step=True) == [in_lock_step] * len(times_ns)
