"""Attention on a CPU, in float32.

A sequence's products have the same shape alone and among others, so other sequences do not change its bits. Sequences
of one shape share a call if their regions of the memory are equally far apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from amusd.models.attention import Attention, AttentionInputs, Window, additive, attend_masked


class Part(NamedTuple):
    """One sequence's rows of a pass."""

    rows: range
    seen: Tensor
    """[rows, end] int64: position of each of the region's first slots on the row's path; -1: not seen.

    Rows beyond those in `rows` are padding.
    """
    first: int
    """The region's first slot."""


def seen_by_chain(start: int, rows: int, end: int) -> Tensor:
    """`Part.seen` [rows, end] of a chain that begins at `start`."""
    positions = torch.arange(end)
    return positions.where(positions <= torch.arange(start, start + rows).unsqueeze(1), -1)


def seen_through(window: Window | None, seen: Tensor) -> Tensor:
    """[rows, end] bool: the slots of `Part.seen` that a layer's window leaves."""
    if window is None:
        return seen >= 0
    return seen >= window.first(seen.amax(1, keepdim=True)).clamp_(min=0)


def cpu_attention(parts: Sequence[Part], num_rows: int) -> Attention:
    """The attention of a pass of `num_rows` rows. Rows outside all parts are padding with finite results."""
    batches = _batched(parts)
    sizes = [len(batch.rows) for batch in batches]
    computed = [row for batch in batches for row in batch.rows]
    order, back = None, None
    if computed != [*range(num_rows)]:
        places = {row: place for place, row in reversed([*enumerate(computed)])}
        order = torch.tensor(computed)
        back = torch.tensor([places.get(row, 0) for row in range(num_rows)])

    def attend_in_batches(layer: AttentionInputs) -> Tensor:
        query = layer.query.float()
        if order is not None:
            query = query.index_select(0, order)
        queries = torch.split(query, sizes)
        found = [batch.attend(own, layer) for batch, own in zip(batches, queries, strict=True)]
        attended = found[0] if len(found) == 1 else torch.cat(found)
        return attended if back is None else attended.index_select(0, back)

    return attend_in_batches


def _batched(parts: Sequence[Part]) -> list[_Batch]:
    """Group the parts that one call can compute together."""
    batches: list[list[Part]] = []
    for part in sorted(parts, key=lambda part: (*part.seen.shape, part.first)):
        if batches and _can_join(batches[-1], part):
            batches[-1].append(part)
        else:
            batches.append([part])
    return [_Batch(batch) for batch in batches]


def _can_join(batch: Sequence[Part], part: Part) -> bool:
    if part.seen.shape != batch[-1].seen.shape:
        return False
    return len(batch) == 1 or part.first - batch[-1].first == batch[1].first - batch[0].first


class _Batch:
    """Parts of one shape [rows, end] at equal distances in the memory, computed by one call."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts, self._number = parts, len(parts)
        self._num_rows, self._end = parts[0].seen.shape
        self._distance = parts[1].first - parts[0].first if len(parts) > 1 else 0
        self._masks: dict[tuple[int, Window | None], Tensor | None] = {}
        self.rows: list[int] = []
        """Rows of the pass, part by part; padding repeats the part's first row."""
        for part in parts:
            self.rows += [*part.rows, *[part.rows.start] * (self._num_rows - len(part.rows))]

    def attend(self, query: Tensor, layer: AttentionInputs) -> Tensor:
        """Attention [rows, heads, dim] for `query`, in the order of `rows`."""
        if not layer.is_plain:
            return self._attend_each(query, layer)
        number, rows, key_heads, dim = self._number, self._num_rows, len(layer.keys), query.shape[2]
        group = query.shape[1] // key_heads
        # The heads of a group are rows of one product, so keys and values are read once and never expanded.
        folded = query.view(number, rows, key_heads, group, dim).permute(0, 2, 3, 1, 4)
        found = F.scaled_dot_product_attention(
            folded.reshape(number, key_heads, group * rows, dim),
            self._regions(layer.keys),
            self._regions(layer.values),
            self._mask(group, layer.window),
            scale=layer.scaling,
        )
        by_row = found.view(number, key_heads, group, rows, dim).permute(0, 3, 1, 2, 4)
        return by_row.reshape(number * rows, key_heads * group, dim)

    def _attend_each(self, query: Tensor, layer: AttentionInputs) -> Tensor:
        found = []
        for part, own in zip(self._parts, torch.split(query, self._num_rows), strict=True):
            inputs = layer._replace(query=own, keys=layer.keys[:, part.first :], values=layer.values[:, part.first :])
            found.append(attend_masked(inputs, seen_through(layer.window, part.seen)))
        return torch.cat(found)

    def _regions(self, tensor: Tensor) -> Tensor:
        """A view [parts, key_heads, end, dim] of [key_heads, slots, dim]."""
        head, slot, item = tensor.stride()
        size = (self._number, tensor.shape[0], self._end, tensor.shape[2])
        offset = tensor.storage_offset() + self._parts[0].first * slot
        return tensor.as_strided(size, (self._distance * slot, head, slot, item), offset)

    def _mask(self, group: int, window: Window | None) -> Tensor | None:
        """[parts, 1, group * rows, end]; None: a lone row sees everything. `group`: query heads per key head."""
        if (key := (group, window)) not in self._masks:
            self._masks[key] = None
            visible = [seen_through(window, part.seen) for part in self._parts]
            if len(self.rows) > 1 or not visible[0].all():
                self._masks[key] = torch.stack([additive(own, torch.float32).repeat(1, group, 1) for own in visible])
        return self._masks[key]
