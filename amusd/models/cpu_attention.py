"""Attention on a CPU, in float32: each sequence in products of the shape that it has alone, which fixes its bits.

Sequences of one shape share a call where their regions of the memory lie at equal distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from amusd.models.attention import Attention, AttentionInputs, additive, attend_masked


class Part(NamedTuple):
    """One sequence's rows of a pass."""

    rows: range
    visible: Tensor
    """[rows, end] bool: which of the region's first slots each row sees; rows beyond those of the pass are padding."""
    first: int
    """The region's first slot."""


def seen_by_chain(start: int, rows: int, end: int) -> Tensor:
    """[rows, end] bool: each row sees the slots up to its own, that of the first being `start`."""
    return torch.arange(end) <= torch.arange(start, start + rows).unsqueeze(1)


def cpu_attention(parts: Sequence[Part], num_rows: int) -> Attention:
    """The attention of a pass of `num_rows` rows; the last ones may be padding, for which it is anything finite."""
    groups: list[_Group] = []
    for part in sorted(parts, key=lambda part: (*part.visible.shape, part.first)):
        if not (groups and groups[-1].add(part)):
            groups.append(_Group(part))
    sizes = [len(group.parts) * len(group.parts[0].visible) for group in groups]
    gathered: list[int] = []
    for part in (part for group in groups for part in group.parts):
        gathered += [*part.rows, *[part.rows.start] * (len(part.visible) - len(part.rows))]
    order, back = None, None
    if gathered != [*range(num_rows)]:
        places = {row: place for place, row in reversed([*enumerate(gathered)])}
        order = torch.tensor(gathered)
        back = torch.tensor([places.get(row, 0) for row in range(num_rows)])

    def attend(layer: AttentionInputs) -> Tensor:
        query = layer.query.float()
        if order is not None:
            query = query.index_select(0, order)
        by_group = torch.split(query, sizes)
        found = [group.attend(q, layer) for group, q in zip(groups, by_group, strict=True)]
        attended = found[0] if len(found) == 1 else torch.cat(found)
        return attended if back is None else attended.index_select(0, back)

    return attend


class _Group:
    """Parts of one shape at equal distances, which one call computes."""

    def __init__(self, part: Part) -> None:
        self.parts = [part]
        self._distance = 0
        # [parts, 1, groups * rows, end] by number of heads in a group; None: a lone row sees everything.
        self._masks: dict[int, Tensor | None] = {}

    def add(self, part: Part) -> bool:
        last = self.parts[-1]
        distance = part.first - last.first
        if part.visible.shape != last.visible.shape or (len(self.parts) > 1 and distance != self._distance):
            return False
        self.parts.append(part)
        self._distance = distance
        return True

    def attend(self, query: Tensor, layer: AttentionInputs) -> Tensor:
        """[rows, heads, dim] for the `query` of all parts, padding included, one part after another."""
        keys, values = layer.keys, layer.values
        number, (rows, end), key_heads, dim = len(self.parts), self.parts[0].visible.shape, *keys.shape[::2]
        if not layer.is_plain:
            regions = [slice(part.first, part.first + end) for part in self.parts]
            each = zip(self.parts, regions, torch.split(query, rows), strict=True)
            layers = [(part, AttentionInputs(q, keys[:, own], values[:, own], *layer[3:])) for part, own, q in each]
            return torch.cat([attend_masked(own, part.visible) for part, own in layers])
        groups = query.shape[1] // key_heads
        if groups not in self._masks:
            self._masks[groups] = None
            if number * rows > 1 or not self.parts[0].visible.all():
                masks = [additive(part.visible, torch.float32).repeat(1, groups, 1) for part in self.parts]
                self._masks[groups] = torch.stack(masks)
        # The heads of a group are rows of one product, so keys and values are read once and never expanded.
        folded = query.view(number, rows, key_heads, groups, dim).permute(0, 2, 3, 1, 4)
        found = F.scaled_dot_product_attention(
            folded.reshape(number, key_heads, groups * rows, dim),
            self._regions(keys, end),
            self._regions(values, end),
            self._masks[groups],
            scale=layer.scaling,
        )
        by_row = found.view(number, key_heads, groups, rows, dim).permute(0, 3, 1, 2, 4)
        return by_row.reshape(number * rows, key_heads * groups, dim)

    def _regions(self, tensor: Tensor, end: int) -> Tensor:
        """A view [parts, key_heads, end, dim] of [key_heads, slots, dim]."""
        heads, slot, number = tensor.stride()
        size = (len(self.parts), tensor.shape[0], end, tensor.shape[2])
        offset = tensor.storage_offset() + self.parts[0].first * slot
        return tensor.as_strided(size, (self._distance * slot, heads, slot, number), offset)
