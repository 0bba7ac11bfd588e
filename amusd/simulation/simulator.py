"""Draft, target and link put together: one schedule on given answers and costs, from its figures to its events.

Several answers may be decoded together: a slot of the batch is a target and a draft as they are for a single one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from amusd.config import DecodingConfig
from amusd.policies.factory import make_policy, policy_name
from amusd.policies.row_cost import DRAFT_ROW_SHARE, RowCost
from amusd.protocol.messages import Open
from amusd.simulation.batch import (
    Device,
    Gathering,
    Intake,
    Pass,
    PassPart,
    PassPrice,
    Step,
    StepPart,
    StepPrice,
    Throughput,
)
from amusd.simulation.clock import DRAFT, TARGET, Journal, Link, VirtualClock, Worker
from amusd.simulation.cost import Costs
from amusd.simulation.draft import DraftActor, Drafting
from amusd.simulation.target import TargetActor
from amusd.simulation.tokens import Answer, guess_places, guess_weights
from amusd.tracing.metrics import GenerationMetrics, total
from amusd.tracing.recorder import Event
from amusd.types import Mode, Role


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated run did."""

    answers: tuple[GenerationMetrics, ...]
    host_ns: tuple[int, ...]
    """Time of the target's host up to the last token, for each answer."""
    target_events: tuple[Event, ...]
    draft_events: tuple[Event, ...]
    throughput: Throughput

    @property
    def metrics(self) -> GenerationMetrics:
        """The sum over all answers."""
        return total(self.answers)


@dataclass(frozen=True, kw_only=True)
class Simulator:
    """A pair of workers that can be run under any schedule. The same values give the same run, to the nanosecond."""

    costs: Costs
    answers: Sequence[Answer]
    max_candidates: int
    """That a target pass can take."""
    tokens_per_step: int = 1
    """That the draft makes in one step (a replay of several), where it runs ahead."""
    accept_next: float = 0.0
    """In a tree: how likely each further guess is right where those before it are wrong."""
    can_branch: bool = True
    """Whether the draft can draft trees; `auto` has it do so then."""
    seed: int = 0
    batch_size: int = 1
    """Answers that are decoded together, where there are so many."""
    num_groups: int = 1
    """Parts of the batch that take turns at the target: one drafts while another is verified."""

    @property
    def num_slots(self) -> int:
        """Answers that are decoded together."""
        return min(self.batch_size, len(self.answers))

    @property
    def accept(self) -> float:
        """Share of the draft's own tokens that are right: what it takes their probability to be."""
        return sum(map(sum, self.answers)) / sum(map(len, self.answers))

    def run(self, decoding: DecodingConfig, *, keep_events: bool = False, events_folder: Path | None = None) -> Outcome:
        """Decode all answers, `batch_size` of them at a time, under the schedule of `decoding`.

        Each has sessions, policy and estimates of its own; devices, and the rule by which a pass begins, are shared.
        Events are kept in the outcome, written to `events_folder` as a run's are, or not recorded at all.
        """
        keep = keep_events or events_folder is not None
        clock = VirtualClock()
        machine = _Machine(self, decoding, clock)
        journals = {role: _journal(role, clock, keep, events_folder) for role in (Role.TARGET, Role.DRAFT)}
        workers = [worker for number in range(self.num_slots) for worker in machine.add_slot(number, journals)]
        clock.run()
        for worker in workers:
            worker.check_ended()
        counts, throughput = machine.intake.counts, machine.intake.throughput
        assert throughput is not None
        outcome = Outcome(
            answers=tuple(count.metrics() for count in counts),
            host_ns=tuple(count.host_ns for count in counts),
            target_events=journals[Role.TARGET].events,
            draft_events=journals[Role.DRAFT].events,
            throughput=throughput,
        )
        for journal in journals.values():
            journal.flush()
        return outcome


class _Machine:
    """What the slots of a batch share, and the slots."""

    def __init__(self, simulator: Simulator, decoding: DecodingConfig, clock: VirtualClock) -> None:
        self._simulator, self._decoding, self._clock = simulator, decoding, clock
        self._has_draft = decoding.mode is not Mode.AUTOREGRESSIVE
        costs, self._target_random = simulator.costs, self._random("target")
        pass_price = PassPrice(costs, self._has_draft, self._target_random)
        self._target_device = Device[PassPart, Pass](clock, TARGET, pass_price)
        self._draft_device = Device[StepPart, Step](clock, DRAFT, StepPrice(costs))
        self._draft_random = self._random("draft")
        self._to_draft_random, self._to_target_random = self._random("to draft"), self._random("to target")
        groups = [range(first, simulator.num_slots, simulator.num_groups) for first in range(simulator.num_groups)]
        in_lock_step = decoding.mode is Mode.SYNCHRONOUS or policy_name(decoding) == "windowed"
        self._gatherings = [Gathering(clock, len(group), in_lock_step=in_lock_step) for group in groups]
        self.intake = Intake(clock, simulator.answers, simulator.num_slots)

    def add_slot(self, number: int, journals: Mapping[Role, Journal]) -> tuple[Worker, Worker]:
        """A target's and a draft's side, which begin now."""
        simulator, clock = self._simulator, self._clock
        target_worker, draft_worker = Worker(clock, TARGET), Worker(clock, DRAFT)
        to_draft = Link(clock, draft_worker, simulator.costs.to_draft, self._to_draft_random)
        to_target = Link(clock, target_worker, simulator.costs.to_target, self._to_target_random)
        target = TargetActor(
            clock=clock,
            worker=target_worker,
            send=to_draft.send,
            intake=self.intake,
            device=self._target_device,
            gathering=self._gatherings[number % simulator.num_groups],
            policy=make_policy(self._decoding, can_branch=simulator.can_branch),
            max_candidates=simulator.max_candidates,
            has_draft=self._has_draft,
            costs=simulator.costs,
            random=self._target_random,
            journal=journals[Role.TARGET],
            draft_works=lambda: self._draft_device.works,
        )
        draft = DraftActor(
            clock=clock,
            worker=draft_worker,
            send=to_target.send,
            make_drafting=functools.partial(self._drafting, RowCost(DRAFT_ROW_SHARE)),
            device=self._draft_device,
            costs=simulator.costs,
            random=self._draft_random,
            journal=journals[Role.DRAFT],
            target_works=lambda: self._target_device.works,
        )
        draft_worker.start(draft.run())
        target_worker.start(target.run())
        return target_worker, draft_worker

    def _drafting(self, step_cost: RowCost, opening: Open) -> Drafting:
        simulator, fan_out = self._simulator, opening.fan_out
        return Drafting(
            opening,
            guess_places(
                simulator.answers[opening.sequence_id - 1],
                simulator.accept_next,
                fan_out,
                f"{opening.sequence_id} {simulator.seed}",
            ),
            guess_weights(simulator.accept, simulator.accept_next, fan_out) if fan_out > 1 else (1.0,),
            simulator.costs,
            self._random(f"drafting {opening.sequence_id}"),
            step_cost,
            simulator.tokens_per_step,
        )

    def _random(self, purpose: str) -> Random:
        return Random(f"{purpose} {self._simulator.seed}")  # noqa: S311 - nothing here is secret


def _journal(role: Role, clock: VirtualClock, keep: bool, folder: Path | None) -> Journal:
    return Journal(role, clock, keep=keep, path=folder and folder / f"{role.value}.jsonl")
