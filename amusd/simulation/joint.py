"""What the sequences of a batch contribute to a pass and to a draft step, and what that costs them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from amusd.simulation.cost import Costs


@dataclass(frozen=True, slots=True)
class PassPart:
    """A sequence's share of a target pass."""

    num_candidates: int
    """Alternatives included."""
    draft_works: bool


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass over all of them."""

    ns: int
    host_ns: int
    """Of the target's host behind it, once for all."""
    num_rows: int
    num_sequences: int


@dataclass(frozen=True, slots=True)
class PassPrice:
    """Of one target."""

    costs: Costs
    has_draft: bool
    random: Random

    def __call__(self, parts: Sequence[PassPart]) -> Pass:
        """Each sequence has a row for its last token and one for each candidate."""
        num_candidates = sum(part.num_candidates for part in parts)
        draft_works = any(part.draft_works for part in parts)
        ns = self.costs.pass_ns(num_candidates, draft_works, self.random, num_sequences=len(parts))
        host_ns = self.costs.host.when(self.has_draft).draw(self.random)
        return Pass(ns, host_ns, num_candidates + len(parts), len(parts))


@dataclass(frozen=True, slots=True)
class StepPart:
    """A sequence's share of a draft step."""

    num_tokens: int
    """One behind the other; of a tree: nodes, all at once."""
    is_tree: bool
    target_works: bool
    random: Random
    """For the times; that of the first one counts."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step over all of them."""

    ns: int
    num_rows: int
    num_sequences: int


@dataclass(frozen=True, slots=True)
class StepPrice:
    """Of one draft."""

    costs: Costs

    def __call__(self, parts: Sequence[StepPart]) -> Step:
        """Chains: as many tokens one behind the other as the longest part has, each for the sequences that go on."""
        costs, random = self.costs, parts[0].random
        target_works = any(part.target_works for part in parts)
        nums = [part.num_tokens for part in parts]
        if parts[0].is_tree:
            ns = costs.tree_step_ns(sum(nums), target_works, random, num_sequences=len(parts))
        else:
            going_on = (sum(num > index for num in nums) for index in range(max(nums)))
            ns = sum(costs.step_ns(1, target_works, random, num_sequences=num) for num in going_on)
        return Step(ns, sum(nums), len(nums))
