"""A simulation's target model and drafter: they cost time, and the answer is a script.

The drafter is equally likely to be right at every position, unlike a real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import Self

from amusd.drafters.base import Drafter, Expansion
from amusd.models.numerics import Numerics
from amusd.models.passes import Rows
from amusd.protocol.draft_session import Guesses, Transition
from amusd.simulation.clock import Clock
from amusd.simulation.cost import Costs
from amusd.simulation.tokens import all_guesses, target_token

if TYPE_CHECKING:
    from amusd.simulation.simulator import Simulator

MANY = 1 << 20


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

    clock: Clock
    costs: Costs
    random: Random
    prompt_length: int
    vocab_size: int
    width: int
    has_draft: bool
    captured_on = None
    max_length = MANY
    feature_columns: ClassVar[dict[str, slice]] = {}
    _host_ns: int = 0

    def __post_init__(self) -> None:
        self.numerics = Numerics(self.width, fixed=False, has_borders=False, prefill_chunk=MANY, num_tracks=MANY)

    def new_caches(self, number: int, capacity: int) -> Sequence[ScriptedCache]:
        """One for each sequence at work."""
        return [ScriptedCache(capacity) for _ in range(number)]

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
    """Drafts chains and trees, right where the answer says so."""

    def __init__(self, clock: Clock, simulator: Simulator, random: Random) -> None:
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
        """One step."""
        found: list[Sequence[Guesses]] = [drafter.guesses(part) for drafter, part in zip(drafters, parts, strict=True)]
        drafters[0].spend([len(guesses) for guesses in found])
        return found

    def guesses(self, part: Expansion) -> list[Guesses]:
        """Guesses behind each node; for a chain, behind the last one and its guesses."""
        positions = [node.position for node in part.nodes]
        if self.fan_out == 1:
            positions = [positions[-1] + index for index in range(part.num_tokens)]
        return [self._guesses[position + 1 - self._first] for position in positions]

    def spend(self, nums: Sequence[int]) -> None:
        """Let the time of a step pass with so many nodes of each tree, or tokens of each chain."""
        costs, random, clock = self._simulator.costs, self._step_random, self._clock
        if self.fan_out == 1:
            going_on = (sum(num > index for num in nums) for index in range(max(nums)))
            ns = sum(costs.step_ns(clock.target_works, random, num_sequences=num) for num in going_on)
        else:
            ns = costs.tree_step_ns(sum(nums), clock.target_works, random, num_sequences=len(nums))
        clock.draft_ns += ns

    def follow(self, transition: Transition) -> None:
        """Take a verdict in."""
        super().follow(transition)
        costs = self._simulator.costs
        duration = costs.rollback if transition.num_discarded else costs.advance
        self._clock.draft_ns += duration.draw(self._random)
