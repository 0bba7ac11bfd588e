"""Simulates one schedule on given answers and costs: the real workers on virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import cast

from amusd.config import DecodingConfig
from amusd.policies.factory import make_policy
from amusd.runner.model_runner import ModelRunner
from amusd.runtime.connection import Connection
from amusd.runtime.draft_client import DraftClient
from amusd.runtime.draft_worker import DraftWorker
from amusd.runtime.target_sequence import Request, TargetSequence
from amusd.runtime.target_worker import TargetWorker
from amusd.sampling.stopping import StopChecker
from amusd.simulation.clock import Direction, VirtualTime
from amusd.simulation.cost import NOTHING, Costs
from amusd.simulation.models import ScriptedDrafter, ScriptedModel
from amusd.simulation.tokens import Answer, vocab_size
from amusd.tracing.metrics import GenerationMetrics, total
from amusd.tracing.recorder import Recorder, as_format
from amusd.tracing.timeline import Timeline

DRAFTER = "simulated"
FOREVER = 1e4


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answers, events and speed of a simulated run."""

    answers: tuple[GenerationMetrics, ...]
    timeline: Timeline
    num_slots: int
    tokens_per_second: float
    """Speed of all slots until the first finds no further answer: then the batch shrinks.

    Time between two answers is not counted.
    """

    @property
    def metrics(self) -> GenerationMetrics:
        """The sum over all answers."""
        return total(self.answers)

    @property
    def draft_idle_fraction(self) -> float | None:
        """Share of the time in which the draft computes nothing; None without a draft.

        Each sequence counts its own part of a step as busy.
        """
        draft = self.metrics.draft
        if draft is None or not draft.open_ns:
            return None
        return max(0.0, 1 - self.num_slots * draft.busy_ns / draft.open_ns)


@dataclass(frozen=True, kw_only=True)
class Simulator:
    """A pair of workers under any schedule. The same values give the same run, to the nanosecond."""

    costs: Costs
    answers: Sequence[Answer]
    max_candidates: int
    accept_next: float = 0.0
    """Probability that each further guess of a tree is right where those before it are wrong."""
    can_branch: bool = True
    seed: int = 0
    batch_size: int = 1

    @property
    def num_slots(self) -> int:
        """Answers decoded together."""
        return min(self.batch_size, len(self.answers))

    @property
    def accept(self) -> float:
        """Share of the draft's own tokens that are right."""
        return sum(map(sum, self.answers)) / sum(map(len, self.answers))

    def run(self, decoding: DecodingConfig, events_folder: Path | None = None) -> Outcome:
        """Decode all answers, `batch_size` at a time, under the schedule of `decoding`.

        The events are in the outcome, and written to `events_folder`, if any.
        """
        clock = VirtualTime(
            Direction(self.costs.to_draft, self._random("to draft")),
            Direction(self.costs.to_target, self._random("to target")),
        )
        where = None if events_folder is None else as_format(events_folder)
        recorders = [
            Recorder("target", where, clock.target_clock),
            Recorder("draft", where, clock.draft_clock),
        ]
        timeline = Timeline([], [])
        for recorder, events in zip(recorders, timeline, strict=True):
            recorder.listeners = (events.append,)
        worker = self._target_worker(decoding, clock, recorders)
        sequences: list[TargetSequence] = []
        speed: float | None = None
        while len(sequences) < len(self.answers) or not all(sequence.is_over for sequence in sequences):
            while worker.has_room and len(sequences) < len(self.answers):
                sequences.append(self._admit(worker, decoding, len(sequences) + 1))
            if worker.has_room and speed is None:
                speed = self._speed(sequences)
            worker.step()
        worker.shut_down()
        clock.finish()
        return Outcome(
            answers=tuple(sequence.metrics for sequence in sequences),
            timeline=timeline,
            num_slots=self.num_slots,
            tokens_per_second=speed or self._speed(sequences),
        )

    @property
    def _prompt_length(self) -> int:
        return 1 if self.costs.target_prefill == NOTHING else 2  # a single token needs no prefill

    def _target_worker(
        self, decoding: DecodingConfig, clock: VirtualTime, recorders: Sequence[Recorder]
    ) -> TargetWorker:
        has_draft = decoding.mode != "autoregressive"
        model = ScriptedModel(
            clock,
            self.costs,
            self._random("target"),
            prompt_length=self._prompt_length,
            vocab_size=vocab_size(max(map(len, self.answers)), decoding.fan_out),
            width=self.max_candidates + 1,
            has_draft=has_draft,
        )
        connection = self._start_draft(clock, recorders[1]) if has_draft else Connection()
        client = DraftClient(recorders[0], connection)
        return TargetWorker(cast("ModelRunner", model), recorders[0], client, self.num_slots)

    def _speed(self, sequences: Sequence[TargetSequence]) -> float:
        answers = [sequence.metrics for sequence in sequences if sequence.metrics.num_tokens]
        slot_ns = sum(answer.total_ns for answer in answers)
        return self.num_slots * sum(answer.num_tokens for answer in answers) * 1e9 / slot_ns

    def _admit(self, worker: TargetWorker, decoding: DecodingConfig, number: int) -> TargetSequence:
        num_tokens = len(self.answers[number - 1])
        request = Request(
            prompt=(number,) * self._prompt_length,
            max_length=self._prompt_length + num_tokens,
            policy=make_policy(decoding, can_branch=self.can_branch),
            drafter=None if decoding.mode == "autoregressive" else DRAFTER,
            max_silence_seconds=FOREVER,
        )
        return worker.admit(request, StopChecker((), (), num_tokens, str))

    def _start_draft(self, clock: VirtualTime, recorder: Recorder) -> Connection:
        random = self._random("draft")
        drafters = [ScriptedDrafter(clock, self, random) for _ in range(self.num_slots)]
        draft = DraftWorker(clock.draft_link, {DRAFTER: drafters}, 1, recorder)
        clock.draft_acts.extend((draft.take_in, draft.propose))
        return Connection(clock.target_link, 1)

    def _random(self, purpose: str) -> Random:
        return Random(f"{purpose} {self.seed}")  # noqa: S311 - nothing here is secret
