"""A drafter that reads the target's hidden states where these have arrived, else its own (EAGLE).

The row at position p takes in its token and a state for position p - 1: the target's feature, or the drafter's own
output. So the drafter runs ahead on its own states, and later features improve rows. Position 0 has a row only while
it is the whole text.

    features  [known]          the target's, on the host
    prefix    slots of the rows of positions 1, 2, ...; slot 0 belongs to position 0 and holds its feature alone

References: EAGLE-1 to 3: https://arxiv.org/abs/2401.15077, https://arxiv.org/abs/2406.16858,
https://arxiv.org/abs/2503.01840.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Self

from amusd.config import Distribution
from amusd.drafters.base import Drafter, Expansion
from amusd.drafters.ngram import NgramCache
from amusd.drafters.tree import TreeSlots, tree_step
from amusd.models.kv_cache import KVCache
from amusd.models.passes import Rows
from amusd.protocol.draft_tree import MAX_NODES, Guesses, Transition
from amusd.protocol.prefix_hash import num_common
from amusd.runner.model_runner import ModelRunner


class EagleDrafter(Drafter):
    """Drafts trees, and chains as trees of fan-out 1, with a `model` that reads features."""

    needs_parent = True  # rows read the parent's state
    draws = False

    def __init__(self, model: ModelRunner, ngrams: NgramCache | None = None, *, cache: KVCache | None = None) -> None:
        """`ngrams`, `cache`: see `ModelDrafter`."""
        cache = model.new_cache(model.max_length, spare=MAX_NODES) if cache is None else cache
        self.model, self.max_length = model, cache.capacity
        self.slots = FeatureSlots(model, cache, ngrams)

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        """Compute nothing yet: rows need features."""
        self.slots.truncate_features(num_common(self.committed, token_ids[:-1]))
        super().open(token_ids, capacity, fan_out)
        self.is_ready = len(token_ids) == 1
        self.slots.open(self.committed, self.distribution, fan_out)

    def take_features(self, start: int, features: Tensor) -> None:
        """See `Drafter`."""
        self.slots.take_features(start, features)
        self.is_ready = self.is_ready or start + len(features) >= self.length - 1

    @classmethod
    def step(cls, drafters: Sequence[Self], parts: Sequence[Expansion]) -> list[Sequence[Guesses]]:
        """See `Drafter`."""
        return tree_step(drafters[0].model, [drafter.slots for drafter in drafters], parts)

    def follow(self, transition: Transition) -> None:
        """See `Drafter`."""
        super().follow(transition)
        self.slots.follow(transition)

    def look_up(self) -> tuple[Sequence[int], float]:
        """See `Drafter`."""
        return self.slots.look_up()


class FeatureSlots(TreeSlots):
    """Slots of rows that start from features."""

    def __init__(self, model: ModelRunner, cache: KVCache, ngrams: NgramCache | None = None) -> None:
        super().__init__(model, cache, ngrams)
        self._features = torch.zeros(model.max_length, model.feature_width, dtype=torch.bfloat16)
        self._known = torch.zeros(model.max_length, dtype=torch.bool)
        self._first_position = 0

    def truncate_features(self, length: int) -> None:
        """Forget the features of positions from `length` on."""
        self._known[length:] = False

    def open(self, committed: list[int], distribution: Distribution, fan_out: int) -> None:
        """Start from `committed` with the known features and the rows computed from them."""
        num_known = int(self._known.long().cumprod(0).sum())
        kept = self._prefix[: min(self._num_computed, num_known - 1) if self._first_position and num_known else 0]
        super().open(committed, distribution, fan_out)
        self._num_computed = len(kept)
        self._prefix[: len(kept)] = kept
        self._free = sorted({*range(1, self._num_slots)} - {*kept.tolist()}, reverse=True)
        self._first_position = min(1, len(committed) - 1)
        self._pending = [*range(self._first_position + len(kept), len(committed))]

    def take_features(self, start: int, features: Tensor) -> None:
        """Take in features; committed rows that started from other states are computed again."""
        number, width = features.shape
        if width != self._features.shape[1]:
            raise ValueError(f"{width} numbers a token, the drafter reads {self._features.shape[1]}")
        is_new = not self._known[start : start + number].all()
        self._features[start : start + number] = features
        self._known[start : start + number] = True
        if is_new:
            self._compute_again(max(start + 1 - self._first_position, 0))  # from the row after the first feature

    def follow(self, transition: Transition) -> None:
        """See `TreeSlots`."""
        super().follow(transition)
        if not self._first_position:  # the row of a lone first token is obsolete
            self._first_position = 1
            self._compute_again(0)

    def _compute_again(self, first: int) -> None:
        """Forget the rows of the prefix from number `first` on."""
        if first <= self._num_computed:
            self._free += self._prefix[first : self._num_computed][::-1].tolist()
            self._pending = [*range(first + self._first_position, len(self._committed))]
            self._num_computed = first

    def _pending_rows(self, most: int, behind: Sequence[Sequence[int]]) -> Rows:
        """Rows of the next missing tokens; writes the states that these start from."""
        num_before = self._num_computed
        rows = super()._pending_rows(most, behind)
        states: list[Tensor] = []
        slots: list[int] = []
        for index in range(num_before, self._num_computed):
            before = index + self._first_position - 1  # the position before the row
            if before >= 0 and self._known[before]:
                states.append(self._features[before])
            elif index == num_before > 0:
                continue  # computed earlier: its own state is there
            else:
                states.append(torch.zeros_like(self._features[0]))
            slots.append(int(self._prefix[index - 1]) if index else 0)
        if slots:
            self._model.write_features(slots, torch.stack(states), self._cache)
        return rows
