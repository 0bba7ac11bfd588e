"""Attention on a CPU: large products without a mask over what every row sees, a small masked part over the rest.

The slots of a block of rows are split at a multiple of `BLOCK`:

    [0, prefix)     seen by every row: two matrix products per key head in the dtype of the cache
    [prefix, end)   the tail, in float32 with a mask

The tail counts as one more key of the prefix: its score is its log-sum-exp, its value its result. Prefix scores are
taken relative to it before they are rounded, so those that matter lose little. Short prefixes are tail.

The split and, at a fixed width, the shapes of products depend on the number of rows and the first position alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from amusd.models.attention import AttentionInputs, additive, attend_masked
from amusd.models.linear import can_multiply_bfloat16

BLOCK = 128
"""Prefixes end at its multiples; blocks of many rows are cut there."""
_LEAST_PREFIX = ((64, BLOCK), (4, 8 * BLOCK), (1, 20 * BLOCK))
_SHORT = 20 * BLOCK
"""Cache slots up to which few rows are as fast in float32."""
_PADDING = 32

_attend_with_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001 - no public name


def cache_dtype(weights: torch.dtype, *, int8: bool) -> torch.dtype:
    """Best dtype for a CPU's keys and values: bfloat16 where it multiplies that and no weight is finer."""
    narrow = int8 or weights is torch.bfloat16
    return torch.bfloat16 if narrow and can_multiply_bfloat16() else torch.float32


def stored_dtype(products: torch.dtype, num_slots: int) -> torch.dtype:
    """Dtype of a cache of `num_slots` whose products are of dtype `products`.

    Float32 in a short one, which passes of few rows would convert each time.
    """
    return products if num_slots > _SHORT else torch.float32


def prefix_of(shared: int, rows: int, dtype: torch.dtype) -> int:
    """End of the prefix of `rows` rows that all see the slots [0, shared); `dtype`: of its products."""
    if dtype is torch.float32:
        return 0  # one kernel does as well there
    prefix = shared // BLOCK * BLOCK
    least = next(slots for least_rows, slots in _LEAST_PREFIX if rows >= least_rows)
    return prefix if prefix >= least else 0


class SplitAttention:
    """An `Attention` of one pass over keys and values in a CPU's memory."""

    def __init__(self, blocks: Sequence[_Block], end: int, first: int) -> None:
        """Use `of_chain` or `of_paths`."""
        self.first = first
        self._blocks = blocks
        self._slots = slice(first, first + end)

    @staticmethod
    def of_chain(start: int, rows: int, end: int, dtype: torch.dtype, first: int = 0) -> SplitAttention:
        """Rows at the slots [start, start + rows), each of which sees the slots up to its own.

        Reads up to `end`; many rows are cut into blocks. `dtype`: of prefix products; others are converted. `first`:
        slot 0 in the memory.
        """
        behind = start + rows
        if rows <= BLOCK or dtype is torch.float32:
            return SplitAttention([_chain(start, range(start, behind), end, dtype)], end, first)
        borders = [start, *range((start // BLOCK + 1) * BLOCK, behind, BLOCK), behind]
        blocks = [_chain(start, range(*ends), ends[1], dtype) for ends in itertools.pairwise(borders)]
        return SplitAttention(blocks, end, first)

    @staticmethod
    def of_paths(shared: int, visible: Tensor, dtype: torch.dtype, first: int = 0) -> SplitAttention:
        """Rows that see the slots [0, shared) and those that `visible` [rows, slots] says."""
        rows, end = visible.shape
        prefix = prefix_of(shared, rows, dtype)
        return SplitAttention([_Block(slice(0, rows), visible[:, prefix:], end, dtype)], end, first)

    def attend(self, layer: AttentionInputs) -> Tensor:
        """See `Attention`. There may be fewer rows than announced: the first ones."""
        query, keys, values = layer.query, layer.keys[:, self._slots], layer.values[:, self._slots]
        if not layer.is_plain or keys.shape[2] != values.shape[2]:
            visible = self._visible(keys.shape[1])
            query = F.pad(query, (0, 0, 0, 0, 0, len(visible) - len(query)))
            filled = layer._replace(query=query, keys=keys, values=values)
            return attend_masked(filled, visible)[: len(layer.query)]
        if len(self._blocks) == 1:
            return self._blocks[0].attend(query, keys, values, layer.scaling)
        return torch.cat([block.attend(query[block.rows], keys, values, layer.scaling) for block in self._blocks])

    @property
    def only_block(self) -> _Block | None:
        """The only block, if it has no prefix."""
        return self._blocks[0] if len(self._blocks) == 1 and not self._blocks[0].prefix else None

    def _visible(self, num_slots: int) -> Tensor:
        """[rows, num_slots] bool: what each row sees."""
        visible = torch.zeros(self._blocks[-1].rows.stop, num_slots, dtype=torch.bool)
        for block in self._blocks:
            visible[block.rows, : block.prefix] = True
            visible[block.rows, block.prefix : block.end] = block.visible
        return visible


class JoinedAttention:
    """Attention of a few rows of each of several sequences, one after another; padding is last.

    Each sequence has products of the shape that it has alone; equal shapes at equal distances share a call.
    """

    def __init__(self, parts: Sequence[tuple[slice, SplitAttention]], num_rows: int) -> None:
        """`parts`: rows of each sequence and their attention; `num_rows`: padding included."""
        self._parts = parts
        self._num_rows = num_rows
        blocks = [attention.only_block for _, attention in parts]
        self._groups: list[_Group] = []
        gathered: list[int] = []
        places: dict[int, int] = {}  # of each row among the gathered ones
        found = [(block, rows, part.first) for block, (rows, part) in zip(blocks, parts, strict=True) if block]
        for block, rows, first in sorted(found, key=lambda each: (len(each[0].visible), each[0].end, each[2])):
            if not (self._groups and self._groups[-1].add(block, first)):
                self._groups.append(_Group(block, first))
            places |= {row: len(gathered) + index for index, row in enumerate(range(rows.start, rows.stop))}
            gathered += [*range(rows.start, rows.stop)]
            gathered += [rows.start] * (len(block.visible) - (rows.stop - rows.start))
        self._can_join = len(found) == len(parts)
        self._gathered = torch.tensor(gathered, dtype=torch.int64)
        self._back = torch.tensor([places.get(row, 0) for row in range(num_rows)])

    def attend(self, layer: AttentionInputs) -> Tensor:
        """See `Attention`; anything finite for padding."""
        query, keys, values = layer.query, layer.keys, layer.values
        if not (self._can_join and layer.is_plain and keys.shape[2] == values.shape[2]):
            attended = torch.cat([part.attend(layer._replace(query=query[rows])) for rows, part in self._parts])
            return F.pad(attended, (0, 0, 0, 0, 0, self._num_rows - len(attended)))
        gathered = query.index_select(0, self._gathered).float()
        by_group = torch.split(gathered, [group.num_rows for group in self._groups])
        found = [group.attend(q, keys, values, layer.scaling) for group, q in zip(self._groups, by_group, strict=True)]
        return (found[0] if len(found) == 1 else torch.cat(found)).index_select(0, self._back)


class _Group:
    """Blocks of sequences that one call computes."""

    def __init__(self, block: _Block, first: int) -> None:
        self._blocks, self._firsts = [block], [first]
        self._mask: Tensor | None = None  # [blocks, 1, groups * rows, end]: the same in every layer

    def add(self, block: _Block, first: int) -> bool:
        last, distance = self._blocks[-1], first - self._firsts[-1]
        fits = block.visible.shape == last.visible.shape and block.is_masked and last.is_masked
        if not fits or (len(self._firsts) > 1 and distance != self._distance):
            return False
        self._blocks.append(block)
        self._firsts.append(first)
        return True

    @property
    def num_rows(self) -> int:
        return len(self._blocks) * len(self._blocks[0].visible)

    @property
    def _distance(self) -> int:
        return self._firsts[1] - self._firsts[0] if len(self._firsts) > 1 else 0

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """Attention of all rows, `query` [rows, heads, dim], in which a block's rows are neighbours."""
        number, (rows, end), key_heads, dim = len(self._blocks), self._blocks[0].visible.shape, *keys.shape[::2]
        groups = query.shape[1] // key_heads
        if self._mask is None and self._blocks[0].is_masked:
            visible = torch.stack([block.visible for block in self._blocks])
            self._mask = torch.stack([additive(each, torch.float32).repeat(1, groups, 1) for each in visible])
        folded = query.view(number, rows, key_heads, groups, dim).permute(0, 2, 3, 1, 4)
        found: Tensor = F.scaled_dot_product_attention(
            folded.reshape(number, key_heads, groups * rows, dim),
            self._regions(keys, end),
            self._regions(values, end),
            self._mask,
            scale=scaling,
        )
        by_row = found.view(number, key_heads, groups, rows, dim).permute(0, 3, 1, 2, 4)
        return by_row.reshape(number * rows, key_heads * groups, dim)

    def _regions(self, tensor: Tensor, end: int) -> Tensor:
        """[blocks, key_heads, end, dim] of [key_heads, slots, dim]."""
        heads, slot, number = tensor.stride()
        size = (len(self._blocks), tensor.shape[0], end, tensor.shape[2])
        offset = tensor.storage_offset() + self._firsts[0] * slot
        return tensor.as_strided(size, (self._distance * slot, heads, slot, number), offset).float()


def _chain(start: int, slots: range, end: int, dtype: torch.dtype) -> _Block:
    columns = torch.arange(prefix_of(slots.start, len(slots), dtype), end)
    visible = columns <= torch.arange(slots.start, slots.stop).unsqueeze(1)
    return _Block(slice(slots.start - start, slots.stop - start), visible, end, dtype)


class _Block:
    def __init__(self, rows: slice, visible: Tensor, end: int, dtype: torch.dtype) -> None:
        """`visible`: [rows, tail], which ends before slot `end`; `dtype`: of the prefix products."""
        self._dtype = dtype
        self.rows = rows
        self.visible = visible
        self.prefix = end - visible.shape[1]
        self.end = end
        self._folded: Tensor | None = None  # [key_heads, groups, rows, dim]; zeros behind the rows of the pass
        self._mask: Tensor | None = None  # [1, 1, groups * rows, tail]: the same in every layer
        self.is_masked = self.prefix > 0 or len(visible) > 1 or not bool(visible.all())
        self._prefix: _Prefix | None = None

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """Attention of these rows, `query` [rows, heads, dim]; a view of other memory."""
        key_heads, _, dim = keys.shape
        count, rows, groups = len(query), len(self.visible), query.shape[1] // key_heads
        # The heads of a group are rows of one product, so keys and values are read once and never expanded.
        shape = (key_heads, groups, rows, dim)
        if self._folded is None or self._folded.shape != shape:
            self._folded = torch.zeros(shape)
        self._folded[:, :, :count].copy_(query.view(count, key_heads, groups, dim).permute(1, 2, 0, 3))
        folded = self._folded.view(key_heads, -1, dim)
        if self._mask is None and self.is_masked:
            self._mask = additive(self.visible, torch.float32).repeat(1, groups, 1).unsqueeze(0)
            self._prefix = _Prefix(self.prefix, folded.shape, self._dtype) if self.prefix else None
        if self._prefix is None:  # one call, without the sum that only a prefix needs
            result: Tensor = F.scaled_dot_product_attention(
                folded.unsqueeze(0),
                keys[:, : self.end].float().unsqueeze(0),
                values[:, : self.end].float().unsqueeze(0),
                self._mask,
                scale=scaling,
            )[0]
        else:
            rounded = self._prefix.rounded(folded, scaling)
            tail, log_sum = _attend_with_sum(
                rounded.unsqueeze(0),
                keys[:, self.prefix : self.end].float().unsqueeze(0),
                values[:, self.prefix : self.end].float().unsqueeze(0),
                attn_mask=self._mask,
                scale=1.0,
            )
            result = self._prefix.joined(keys, values, tail[0], log_sum[0])  # [key_heads, groups * rows, dim]
        return result.view(shape)[:, :, :count].permute(2, 0, 1, 3).flatten(1, 2)


class _Prefix:
    """The slots that all rows of a block see, and work memory for every layer."""

    def __init__(self, num_slots: int, shape: torch.Size, dtype: torch.dtype) -> None:
        """`shape`: [key_heads, rows, dim] of the queries; `dtype`: of the products."""
        self._num_slots = num_slots
        self._query = torch.empty(shape, dtype=dtype)
        self._mixed = torch.empty(shape, dtype=dtype)
        key_heads, rows, _ = shape
        # Behind the scores of the slots stands that of the tail, then padding that keeps rows aligned.
        self._scores = torch.full((key_heads, rows, num_slots + _PADDING), -torch.inf, dtype=dtype)
        self._weights = torch.empty_like(self._scores)
        self._tail_scores = self._scores[:, :, num_slots]
        self._tail_weights = self._weights[:, :, num_slots : num_slots + 1]

    def rounded(self, query: Tensor, scaling: float) -> Tensor:
        return torch.mul(query, scaling, out=self._query).float()

    def joined(self, keys: Tensor, values: Tensor, tail: Tensor, log_sum: Tensor) -> Tensor:
        """Attention [key_heads, rows, dim] of the `rounded` queries to prefix and tail, given the tail's.

        `log_sum` [key_heads, rows]: logarithm of the sum of the tail's exponentials.
        """
        num_slots, dtype = self._num_slots, self._query.dtype
        reference = log_sum.to(dtype)
        torch.sub(log_sum, reference, out=self._tail_scores)  # what rounding left
        below = reference.neg_().unsqueeze(2).expand(-1, -1, num_slots)
        for head in range(len(keys)):
            scores, weights = self._scores[head], self._weights[head]
            seen = keys[head, :num_slots].to(dtype)
            torch.addmm(below[head], self._query[head], seen.t(), out=scores[:, :num_slots])
            torch.softmax(scores, -1, out=weights)
            torch.mm(weights[:, :num_slots], values[head, :num_slots].to(dtype), out=self._mixed[head])
        return torch.addcmul(self._mixed, self._tail_weights, tail)
