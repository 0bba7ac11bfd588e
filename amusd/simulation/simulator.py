"""Draft, target and link put together: one schedule on given answers and costs, from its figures to its events."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from amusd.config import DecodingConfig
from amusd.policies.factory import make_policy
from amusd.policies.row_cost import DRAFT_ROW_SHARE, RowCost
from amusd.protocol.messages import Open
from amusd.simulation.clock import DRAFT, TARGET, VirtualClock, Worker
from amusd.simulation.cost import Costs
from amusd.simulation.draft import ChainDrafting, DraftActor, Drafting
from amusd.simulation.journal import Journal
from amusd.simulation.link import Link
from amusd.simulation.target import TargetActor
from amusd.simulation.tokens import Answer, guess_places, guess_weights
from amusd.simulation.tree_drafting import TreeDrafting
from amusd.tracing.metrics import GenerationMetrics, total
from amusd.tracing.recorder import Event
from amusd.types import Mode, Role


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated run did."""

    answers: tuple[GenerationMetrics, ...]
    host_ns: tuple[int, ...]
    """Of each answer, the time of the target's host up to the last token."""
    target_events: tuple[Event, ...]
    draft_events: tuple[Event, ...]

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
    """Of a tree: how likely each further guess is right where those before it are wrong."""
    can_branch: bool = True
    """Whether the draft can draft trees; `auto` has it do so then."""
    seed: int = 0

    @property
    def accept(self) -> float:
        """Share of the draft's own tokens that are right: what it takes their probability to be."""
        return sum(map(sum, self.answers)) / sum(map(len, self.answers))

    def run(self, decoding: DecodingConfig, *, keep_events: bool = False, events_folder: Path | None = None) -> Outcome:
        """Decode all answers, one after another, under the schedule of `decoding`.

        Events are kept in the outcome, written to `events_folder` as a run's are, or not recorded at all.
        """
        keep = keep_events or events_folder is not None
        clock = VirtualClock()
        target_worker, draft_worker = Worker(clock, TARGET), Worker(clock, DRAFT)
        to_draft = Link(clock, draft_worker, self.costs.to_draft, self._random("to draft"))
        to_target = Link(clock, target_worker, self.costs.to_target, self._random("to target"))
        target = TargetActor(
            clock=clock,
            worker=target_worker,
            send=to_draft.send,
            answers=self.answers,
            policy=make_policy(decoding, can_branch=self.can_branch),
            max_candidates=self.max_candidates,
            has_draft=decoding.mode is not Mode.AUTOREGRESSIVE,
            costs=self.costs,
            random=self._random("target"),
            journal=_journal(Role.TARGET, clock, keep, events_folder),
            draft_works=lambda: draft.works,
        )
        draft = DraftActor(
            clock=clock,
            worker=draft_worker,
            send=to_target.send,
            make_drafting=functools.partial(self._drafting, RowCost(DRAFT_ROW_SHARE)),
            costs=self.costs,
            random=self._random("draft"),
            journal=_journal(Role.DRAFT, clock, keep, events_folder),
            target_works=lambda: target.works,
        )
        draft_worker.start(draft.run())
        target_worker.start(target.run())
        clock.run()
        target_worker.check_ended()
        draft_worker.check_ended()
        outcome = Outcome(
            answers=tuple(counts.metrics() for counts in target.finished),
            host_ns=tuple(counts.host_ns for counts in target.finished),
            target_events=target.journal.events,
            draft_events=draft.journal.events,
        )
        target.journal.flush()
        draft.journal.flush()
        return outcome

    def _drafting(self, step_cost: RowCost, opening: Open) -> Drafting:
        random = self._random(f"drafting {opening.sequence_id}")
        answer = self.answers[opening.sequence_id - 1]
        if opening.fan_out:
            seed = f"{opening.sequence_id} {self.seed}"
            places = guess_places(answer, self.accept_next, opening.fan_out, seed)
            weights = guess_weights(self.accept, self.accept_next, opening.fan_out)
            return TreeDrafting(opening, places, weights, self.costs, random, step_cost)
        return ChainDrafting(opening, answer, self.costs, random, self.tokens_per_step)

    def _random(self, purpose: str) -> Random:
        return Random(f"{purpose} {self.seed}")  # noqa: S311 - nothing here is secret


def _journal(role: Role, clock: VirtualClock, keep: bool, folder: Path | None) -> Journal:
    return Journal(role, clock, keep=keep, path=folder and folder / f"{role.value}.jsonl")
