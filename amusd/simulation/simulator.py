"""Simulates one schedule on given answers and costs: the real workers on virtual time.

Model and drafter only cost time; the answer is given. The drafter is equally likely to be right at every position,
unlike a real drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import ClassVar, cast

from typing_extensions import Self

from amusd.config import DecodingConfig
from amusd.drafters.base import Drafter, Expansion
from amusd.models.numerics import Numerics
from amusd.models.passes import Rows
from amusd.policies.factory import make_policy
from amusd.protocol.draft_tree import Guesses, Transition
from amusd.runner.model_runner import ModelRunner
from amusd.runtime.connection import Connection
from amusd.runtime.draft_client import DraftClient
from amusd.runtime.draft_worker import DraftWorker
from amusd.runtime.target_sequence import TargetSequence
from amusd.runtime.target_worker import TargetWorker
from amusd.runtime.verifier import Request
from amusd.sampling.stopping import StopChecker
from amusd.simulation.clock import Direction, VirtualTime
from amusd.simulation.cost import NOTHING, Costs
from amusd.simulation.tokens import Script, all_guesses, target_token
from amusd.tracing.metrics import GenerationMetrics, total
from amusd.tracing.recorder import Recorder, as_format
from amusd.tracing.timeline import Timeline

DRAFTER = "simulated"
FOREVER = 1e4
MANY = 1 << 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answers, events and speed of a simulated run."""

    answers: tuple[GenerationMetrics, ...]
    timeline: Timeline
    num_slots: int
    tokens_per_second: float
    """Speed of all slots while the batch is full. Time between two answers does not count."""

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
    answers: Sequence[Script]
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

        The events are in the outcome, and written to `events_folder`, if any. Raises `ConfigError` for a mistake in a
        user's policy.
        """
        clock = VirtualTime(
            Direction(self.costs.to_draft, self._random("to draft")),
            Direction(self.costs.to_target, self._random("to target")),
        )
        where = None if events_folder is None else as_format(events_folder)
        recorders = [Recorder("target", where, clock.target_clock), Recorder("draft", where, clock.draft_clock)]
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
        for sequence in sequences:
            if sequence.error is not None:
                raise sequence.error
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
        random, width = self._random("target"), self.max_candidates + 1
        model = ScriptedModel(clock, self.costs, random, self._prompt_length, width, has_draft)
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


@dataclass(eq=False)
class ScriptedCache:
    """The number of positions that a cache would hold."""

    capacity: int
    length: int = 0
    history = None

    def truncate(self, length: int) -> None:
        """Keep `[0, length)`."""
        self.length = length


@dataclass
class ScriptedModel:
    """The part of a `ModelRunner` that a `TargetWorker` needs for greedy decoding."""

    clock: VirtualTime
    costs: Costs
    random: Random
    prompt_length: int
    width: int
    has_draft: bool
    max_length = MANY
    vocab_size = 1 << 31
    feature_columns: ClassVar[dict[str, slice]] = {}
    _host_ns: int = 0

    def __post_init__(self) -> None:
        self.numerics = Numerics(self.width, fixed=False, has_borders=False, prefill_chunk=MANY, num_tracks=MANY)

    def new_caches(self, num_caches: int, capacity: int) -> Sequence[ScriptedCache]:
        """Make `num_caches` caches."""
        return [ScriptedCache(capacity) for _ in range(num_caches)]

    def prefill(self, token_ids: Sequence[int], cache: ScriptedCache) -> None:
        """Take in a prompt, at the same cost whatever its length."""
        self.clock.compute(self.costs.target_prefill.draw(self.random))
        cache.length += len(token_ids)

    def run(self, batch: Sequence[Rows]) -> list[SimpleNamespace]:
        """One pass; the part of each `ModelOutput` that a `Verifier` needs for greedy decoding."""
        num_candidates = sum(len(rows.token_ids) for rows in batch) - len(batch)
        draft_works = self.clock.draft_works
        ns = self.costs.pass_ns(num_candidates, draft_works, self.random, num_sequences=len(batch))
        self._host_ns = self.costs.host.draw(self.random, self.has_draft)
        self.clock.compute(ns)
        return [SimpleNamespace(sample=partial(self._sample, self._choices(rows))) for rows in batch]

    def keep(self, rows: Sequence[int], cache: ScriptedCache) -> None:
        """Continue with these rows of the last pass."""
        cache.length += len(rows)

    def _sample(self, token_ids: list[int], row: int) -> tuple[int, None]:
        self.clock.let_pass(self._host_ns)  # once after a pass
        self._host_ns = 0
        return token_ids[row], None

    def _choices(self, rows: Rows) -> list[int]:
        parents = range(len(rows.token_ids) - 1) if rows.parents is None else rows.parents
        depths = [0]
        for parent in parents:
            depths.append(depths[parent] + 1)
        first = rows.cache.length + 1 - self.prompt_length
        if rows.parents is None:
            rows.cache.length += len(depths)
        return [target_token(first + depth) for depth in depths]


class ScriptedDrafter(Drafter):
    """Drafts chains and trees; the answer says where a token is right."""

    def __init__(self, clock: VirtualTime, simulator: Simulator, random: Random) -> None:
        self._clock, self._simulator, self._random = clock, simulator, random

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        """Take in a prompt, whose first token is the answer's number."""
        super().open(token_ids, capacity, fan_out)
        simulator, number = self._simulator, token_ids[0]
        seed = f"{number} {simulator.seed}"
        answer = simulator.answers[number - 1]
        self._first = len(token_ids)
        self._guesses = all_guesses(answer, simulator.accept, simulator.accept_next, fan_out, seed)
        self._step_random = Random(f"drafting {seed}")  # noqa: S311 - nothing here is secret
        self._clock.draft_ns += simulator.costs.draft_prefill.draw(self._random)

    @classmethod
    def step(cls, drafters: Sequence[Self], parts: Sequence[Expansion]) -> list[Sequence[Guesses]]:
        """See `Drafter`."""
        found: list[Sequence[Guesses]] = [drafter.guesses(part) for drafter, part in zip(drafters, parts, strict=True)]
        drafters[0].spend([len(guesses) for guesses in found])
        return found

    def guesses(self, part: Expansion) -> list[Guesses]:
        """Guesses after each node; for a chain, after the last one and its guesses."""
        positions = [node.position for node in part.nodes]
        if self.fan_out == 1:
            positions = [positions[-1] + index for index in range(part.num_tokens)]
        return [self._guesses[position + 1 - self._first] for position in positions]

    def spend(self, nums: Sequence[int]) -> None:
        """Spend the time of a step; `nums`: nodes of each tree, or tokens of each chain."""
        costs, random, clock = self._simulator.costs, self._step_random, self._clock
        if self.fan_out == 1:
            going_on = (sum(num > index for num in nums) for index in range(max(nums)))
            ns = sum(costs.step_ns(clock.target_works, random, num_sequences=num) for num in going_on)
        else:
            ns = costs.tree_step_ns(sum(nums), clock.target_works, random, num_sequences=len(nums))
        clock.draft_ns += ns

    def follow(self, transition: Transition) -> None:
        """Take in a verdict."""
        super().follow(transition)
        costs = self._simulator.costs
        duration = costs.rollback if transition.num_discarded else costs.advance
        self._clock.draft_ns += duration.draw(self._random)
