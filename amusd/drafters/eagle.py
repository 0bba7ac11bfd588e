"""A drafter that reads the target's hidden states where they have come, and its own beyond them (EAGLE).

The row at position p takes in its token and a state for position p - 1: the target's feature, or the drafter's own
output. So it runs ahead on its own states, and later features improve its rows. Position 0 has no row.

    features  [known]          the target's, on the host
    prefix    slots of the rows of positions 1, 2, ...; slot 0 belongs to position 0 and holds its feature alone

References: EAGLE-1 to 3: https://arxiv.org/abs/2401.15077, https://arxiv.org/abs/2406.16858,
https://arxiv.org/abs/2503.01840.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from amusd.drafters.base import Expansion
from amusd.drafters.ngram import NgramCache
from amusd.drafters.tree import ModelTreeDrafter, TreePart
from amusd.models.cached_model import CachedModel
from amusd.models.kv_cache import KVCache
from amusd.protocol.prefix_hash import num_common


class EagleDrafter(ModelTreeDrafter):
    """Drafts trees, and chains as trees of fan-out 1, with a `model` that reads features."""

    draws = False

    def __init__(self, model: CachedModel, ngrams: NgramCache | None = None, *, cache: KVCache | None = None) -> None:
        """`ngrams`, `cache`: see `ModelTreeDrafter`."""
        super().__init__(model, ngrams, cache=cache)
        self._features = torch.zeros(model.max_length, model.feature_width, dtype=torch.bfloat16)
        self._known = torch.zeros(model.max_length, dtype=torch.bool)
        self._prefix = np.arange(self._num_slots)
        self._num_computed = self._first_position = 0

    @property
    def is_chain(self) -> bool:
        """Its chains are trees of fan-out 1."""
        return False

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        """Compute nothing yet: rows need features. Rows and features that agree with the sequence before are kept."""
        self._known[num_common(self.committed, token_ids[:-1]) :] = False
        num_known = int(self._known.long().cumprod(0).sum())
        kept = self._prefix[: min(self._num_computed, num_known - 1) if self._first_position and num_known else 0]
        super().open(token_ids, capacity, fan_out)
        self.is_ready = len(token_ids) == 1
        self._num_computed = len(kept)
        self._prefix[: len(kept)] = kept
        self._free = sorted({*range(1, self._num_slots)} - {*kept.tolist()}, reverse=True)
        self._first_position = min(1, len(token_ids) - 1)
        self._pending = [*range(self._first_position + len(kept), len(token_ids))]

    def take_features(self, start: int, features: Tensor) -> None:
        """See `Drafter`. Committed rows that started from another state are computed again."""
        number, width = features.shape
        if width != self._features.shape[1]:
            raise ValueError(f"{width} numbers a token, the drafter reads {self._features.shape[1]}")
        is_new = not self._known[start : start + number].all()
        self._features[start : start + number] = features
        self._known[start : start + number] = True
        self.is_ready = self.is_ready or start + number >= self.length - 1
        first = max(start + 1 - self._first_position, 0)  # in the prefix: the row behind the first feature
        if is_new and first < self._num_computed:
            self._free += self._prefix[first : self._num_computed][::-1].tolist()
            self._pending = [*range(first + self._first_position, self.length)]
            self._num_computed = first

    def plan(self, expansion: Expansion) -> TreePart:
        """The rows of `expansion`; due rows of the prefix have passes of their own before it."""
        most = self.model.numerics.max_rows(0)
        while self._pending and expansion.nodes[0] is not expansion.root:
            self.model.run([self._pending_part(most, ())[0]])
        return super().plan(expansion)

    def _pending_part(self, most: int, behind: Sequence[Sequence[int]]) -> TreePart:
        """The next missing tokens, once the states of their rows are in place."""
        num_before = self._num_computed
        part = super()._pending_part(most, behind)
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
            self.model.write_features(slots, torch.stack(states), self._cache)
        return part

    def _prefill(self, text: Sequence[int]) -> None:
        pass

    def _prepare(self) -> None:
        self._prepare_rankers()
