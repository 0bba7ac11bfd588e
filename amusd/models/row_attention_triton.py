"""`attend_rows` in Triton: one kernel for the splits of the keys, one that combines them.

A program computes one tile and one key head over some splits (`num_splits`). A tile's rows are pairs of a row and a
query head of the group, so the heads of a group share loads. A block that all rows read through the table is one item;
a block beyond the length is an item for each path. Rows of other paths weigh its values by zero, which changes no bit.

The model alone decides a tile's size, and so the order of each sum. Importing this module imports triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from amusd.models.row_attention import BLOCK, NUM_NEAR, SPLIT, num_splits
from amusd.models.row_attention import attend_rows as ordinary

NUM_PROGRAMS = 1024
"""About the most programs of the first kernel: 8 for each multiprocessor of an H100. Programs take splits in turn.

More programs would start without work, which costs microseconds.
"""

_MOST_BYTES = 1024  # a head of this size fits neither into shared memory nor into registers

_BLOCK = tl.constexpr(BLOCK)
_SPLIT = tl.constexpr(SPLIT)
_NUM_NEAR = tl.constexpr(NUM_NEAR)
_COMBINED = tl.constexpr(16)
_LOG2_E = tl.constexpr(1.4426950408889634)


def tile_of(group: int) -> tuple[int, int]:
    """Tile of a model with `group` query heads per key head: rows of the product, and rows of the pass.

    Up to a group of 8, a tile has at least 8 rows of the pass, so that a pass of 8 reads its keys once. `tl.dot` takes
    at least 16 rows. Larger groups have fewer rows of the pass: sums beyond 64 x 128 leave the registers.
    """
    size = max(16, min(64, triton.next_power_of_2(8 * group)), triton.next_power_of_2(group))
    return size, size // group


def attend_rows(
    query, keys, values, table, lengths, branches, row_paths, positions, scaling, softcap=0.0, sinks=None, firsts=None
):
    """See `amusd.models.row_attention.attend_rows`; the slots of a head are contiguous."""
    seqs, rows, heads, dim = query.shape
    key_heads = keys.shape[0]
    assert all(cached.stride()[1:] == (dim, 1) and cached.stride(0) % dim == 0 for cached in (keys, values))
    padded_dim = triton.next_power_of_2(dim)
    if padded_dim * keys.element_size() >= _MOST_BYTES:
        where = table, lengths, branches, row_paths, positions
        more = scaling, softcap, sinks, firsts
        return ordinary._init_fn(query, keys, values, *where, *more)  # noqa: SLF001 - no public name
    size, tile_rows = tile_of(heads // key_heads)
    tiles, splits = triton.cdiv(rows, tile_rows), num_splits(table.shape[1])
    programs = min(splits, triton.cdiv(NUM_PROGRAMS, tiles * key_heads * seqs))
    query, branches, positions = query.contiguous(), branches.contiguous(), positions.contiguous()
    has_window = firsts is not None
    firsts = firsts.contiguous() if has_window else positions
    sums = query.new_empty((seqs, rows, heads, splits, dim), dtype=torch.float32)
    maxima = query.new_empty((seqs, rows, heads, splits), dtype=torch.float32)
    totals = torch.empty_like(maxima)
    result = torch.empty_like(query)
    _attend_splits[tiles * key_heads, seqs, programs](
        query, keys, values, table, lengths.contiguous(), branches, row_paths.contiguous(), positions, firsts,
        sums, maxima, totals,
        keys.stride(0) // dim, values.stride(0) // dim, table.stride(0), rows, splits, max(1, branches.shape[1]),
        branches.shape[2], scaling,
        has_window, softcap, heads, heads // key_heads, dim, padded_dim, size,
        num_warps=_num_warps(size * padded_dim, keys.element_size()),
        num_stages=_num_stages(size * padded_dim, padded_dim, keys.element_size()),
    )  # fmt: skip
    _combine_splits[heads, rows, seqs](
        sums, maxima, totals, positions, firsts, query if sinks is None else sinks, result,
        rows, splits, heads, dim, padded_dim, has_window, sinks is not None,
        num_warps=4,  # 16 splits of 128 columns are 16 registers a thread
        num_stages=1,  # no products to overlap with
    )  # fmt: skip
    return result


def _num_warps(num_sums: int, item_size: int) -> int:
    """Warps of a program.

    4 hold the sums of 64 rows of 128 in registers. Larger tiles need 8, and so does float32, whose products use
    registers instead of matrix units.
    """
    return 4 if num_sums <= 64 * 128 and item_size < 4 else 8


def _num_stages(num_sums: int, padded_dim: int, item_size: int) -> int:
    """Items under way at once.

    3: slots, keys and values, products. 2 if a block's keys and values exceed 32 KiB of shared memory, the size for a
    head of 128 in bfloat16. 1 beyond a tile of 64 x 128 in bfloat16: some GPUs have 99 KiB.
    """
    if num_sums * item_size > 64 * 128 * 2:
        return 1
    return 3 if 2 * BLOCK * padded_dim * item_size <= 32 * 1024 else 2


_NUMBERS = ["keys_per_head", "values_per_head", "table_stride", "num_rows", "num_splits", "num_paths", "depth"]
_INDICES = ["table", "lengths", "branches", "row_paths", "positions", "firsts"]


@triton.jit
def _num_splits(num_positions):
    near = tl.minimum(num_positions, _NUM_NEAR * _BLOCK)
    return (near + _BLOCK - 1) // _BLOCK + (num_positions - near + _SPLIT - 1) // _SPLIT


@triton.jit
def _split_of(position):
    return _num_splits(tl.maximum(position, 0) + 1) - 1


@triton.jit
def _first_seen(first, position):
    """The first position that a row sees; for a padded row, beyond all positions."""
    return tl.where(position < 0, 2147483647, tl.maximum(first, 0).to(tl.int32))


@triton.jit
def _window(firsts, live, position, has_window: tl.constexpr):
    """The first position that each row of a tile sees (unused without a window), and the tile's first split."""
    first, first_split = position, 0
    if has_window:
        first = _first_seen(tl.load(firsts, mask=live, other=0), position)
        first_split = _split_of(tl.minimum(tl.min(first, 0), tl.max(position, 0)))
    return first, first_split


# Values and alignment of inputs make no variants: the model alone decides what is compiled.
@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_INDICES)
def _attend_splits(
    query, keys, values, table, lengths, branches, row_paths, positions, firsts, sums, maxima, totals,
    keys_per_head: tl.int64, values_per_head: tl.int64, table_stride: tl.int64,
    num_rows, num_splits, num_paths, depth, scaling,
    has_window: tl.constexpr, softcap: tl.constexpr, heads: tl.constexpr, group: tl.constexpr,
    dim: tl.constexpr, padded_dim: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    # The rows of this tile: [size] pairs of a row of the pass and a query head
    key_head = (tl.program_id(0) % (heads // group)).to(tl.int64)
    seq = tl.program_id(1).to(tl.int64)
    pair = tl.arange(0, size)
    row = tl.program_id(0) // (heads // group) * (size // group) + pair // group
    live = (pair < size // group * group) & (row < num_rows)
    position = tl.load(positions + seq * num_rows + row, mask=live, other=-1).to(tl.int32)
    path = tl.load(row_paths + seq * num_rows + row, mask=live, other=0).to(tl.int32)
    num_used = tl.minimum(tl.max(path, 0) + 1, num_paths)  # other paths would cost products and change nothing
    last = tl.max(position, 0)
    first, first_split = _window(firsts + seq * num_rows + row, live, position, has_window)
    length = tl.load(lengths + seq)
    length = tl.where(length > last, 2147483647, length).to(tl.int32)  # a chain: the table has every position

    column = tl.arange(0, padded_dim)[None, :]
    in_head = column < dim
    result_row = (seq * num_rows + row) * heads + key_head * group + pair % group
    rows = tl.load(query + result_row[:, None] * dim + column, mask=live[:, None] & in_head, other=0.0)
    rows = rows.to(keys.dtype.element_ty)  # [size, padded_dim]
    keys += key_head * keys_per_head * dim
    values += key_head * values_per_head * dim
    table += seq * table_stride
    branches += seq * num_paths * depth
    for split in range(first_split + tl.program_id(2), _num_splits(last + 1), tl.num_programs(2)):
        start, maximum, total, result = _attend_split(
            split, rows, position, first, path, num_used, last, length, keys, values, table, branches, depth, scaling,
            has_window, softcap, dim,
        )  # fmt: skip
        place = result_row * num_splits + split
        sees_split = live & (position >= start)
        tl.store(sums + place[:, None] * dim + column, result, mask=sees_split[:, None] & in_head)
        tl.store(maxima + place, maximum, mask=sees_split)
        tl.store(totals + place, total, mask=sees_split)


@triton.jit
def _attend_split(
    split, rows, position, first, path, num_used, last, length,
    keys, values, table, branches, depth, scaling,
    has_window: tl.constexpr, softcap: tl.constexpr, dim: tl.constexpr,
):  # fmt: skip
    """The first position of a split; for each row, largest score, sum of weights, weighted sum of values."""
    is_near = split < _NUM_NEAR
    start = tl.where(is_near, split * _BLOCK, _NUM_NEAR * _BLOCK + (split - _NUM_NEAR) * _SPLIT)
    num_blocks = tl.minimum((last - start) // _BLOCK + 1, tl.where(is_near, 1, _SPLIT // _BLOCK))
    num_shared = tl.minimum(tl.maximum(length - start, 0) // _BLOCK, num_blocks)
    skipped = 0  # items before every row's window
    if has_window:
        num_unseen = tl.maximum(tl.minimum(tl.min(first, 0), last) - start, 0) // _BLOCK
        skipped = tl.minimum(num_unseen, num_shared) + tl.maximum(num_unseen - num_shared, 0) * num_used
    column = tl.arange(0, rows.shape[1])[None, :]
    maximum = tl.full((rows.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((rows.shape[0],), tl.float32)
    result = tl.zeros(rows.shape, tl.float32)
    for item in range(skipped, num_shared + (num_blocks - num_shared) * num_used):
        wanted, reach, seen, slot = _block(
            item, start, num_shared, num_used, position, first, path, length, table, branches, depth, has_window
        )
        place, mask = slot[:, None] * dim + column, seen[:, None] & (column < dim)
        block_keys = tl.load(keys + place, mask=mask, other=0.0)  # [_BLOCK, padded_dim]
        scores = tl.dot(rows, tl.trans(block_keys), input_precision="ieee") * scaling
        if softcap > 0:
            scores = softcap * (2 * tl.sigmoid(scores * (2 / softcap)) - 1)
        in_reach = wanted[None, :] <= reach[:, None]
        if has_window:
            in_reach = in_reach & (wanted[None, :] >= first[:, None])
        scores = tl.where(in_reach, scores * _LOG2_E, float("-inf"))
        maximum, total, result = _online_softmax(scores, values + place, mask, maximum, total, result)
    return start, maximum, total, result


@triton.jit
def _block(
    item, start, num_shared, num_used, position, first, path, length, table, branches, depth, has_window: tl.constexpr
):
    """The positions of an item's block, the last that each row sees, whether any row sees each, and the slots."""
    beyond = tl.maximum(item - num_shared, 0)
    block = tl.minimum(item, num_shared) + beyond // num_used
    item_path = beyond % num_used
    reach = tl.where((path == item_path) | (item < num_shared), position, -1)
    wanted = start + block * _BLOCK + tl.arange(0, _BLOCK)
    seen = wanted <= tl.max(reach, 0)
    if has_window:
        seen = seen & (wanted >= tl.min(tl.where(reach < 0, 2147483647, first), 0))
    committed = tl.load(table + wanted, mask=seen & (wanted < length), other=0)
    own = branches + item_path * depth + (wanted - length)
    slot = committed + tl.load(own, mask=seen & (wanted >= length), other=0)
    return wanted, reach, seen, slot


@triton.jit
def _online_softmax(scores, values, mask, maximum, total, result):
    """`maximum`, `total` and `result` with one more block."""
    larger = tl.maximum(maximum, tl.max(scores, 1))
    finite = tl.where(larger == float("-inf"), 0.0, larger)
    kept = tl.exp2(maximum - finite)  # 1 for rows that do not see the block
    weights = tl.exp2(scores - finite[:, None])
    total = total * kept + tl.sum(weights, 1)
    block_values = tl.load(values, mask=mask, other=0.0)
    weights = weights.to(block_values.dtype)
    return larger, total, tl.dot(weights, block_values, acc=result * kept[:, None], input_precision="ieee")


@triton.jit(do_not_specialize=["num_rows", "num_splits"], do_not_specialize_on_alignment=[*_INDICES, "sinks"])
def _combine_splits(
    sums, maxima, totals, positions, firsts, sinks, result,
    num_rows, num_splits,
    heads: tl.constexpr, dim: tl.constexpr, padded_dim: tl.constexpr,
    has_window: tl.constexpr, has_sinks: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(2).to(tl.int64) * num_rows + tl.program_id(1)
    result_row = row * heads + head
    position = tl.load(positions + row).to(tl.int32)
    num_seen, first_split = _num_splits(position + 1), 0
    if has_window:
        first_split = _split_of(tl.minimum(_first_seen(tl.load(firsts + row), position), position))
    column = tl.arange(0, padded_dim)
    in_head = column < dim
    maximum = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    if has_sinks:
        maximum = tl.load(sinks + head).to(tl.float32) * _LOG2_E
        total = tl.full((), 1.0, tl.float32)
    combined = tl.zeros((padded_dim,), tl.float32)
    for first in range(first_split, num_seen, _COMBINED):
        split = first + tl.arange(0, _COMBINED)
        seen = split < num_seen
        place = result_row * num_splits + split
        split_maximum = tl.load(maxima + place, mask=seen, other=float("-inf"))
        split_total = tl.load(totals + place, mask=seen, other=0.0)
        split_sums = tl.load(
            sums + place[:, None] * dim + column[None, :], mask=seen[:, None] & in_head[None, :], other=0.0
        )
        larger = tl.maximum(maximum, tl.max(split_maximum, 0))  # finite: a row sees something in each of its splits
        kept = tl.exp2(maximum - larger)
        weight = tl.exp2(split_maximum - larger)
        total = total * kept + tl.sum(split_total * weight, 0)
        combined = combined * kept + tl.sum(split_sums * weight[:, None], 0)
        maximum = larger
    combined = combined / tl.where(total > 0, total, 1.0)
    tl.store(result + result_row * dim + column, combined.to(result.dtype.element_ty), mask=in_head)
