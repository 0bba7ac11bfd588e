"""The operators of `fused.py` in Triton. Importing this module imports triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024  # columns of one program of `silu_and_multiply`: 8 a thread


def rotate_and_store(joint, rotation, norm, storage, slots, num_queries, epsilon):
    """See `amusd.models.fused.rotate_and_store`."""
    rows, heads, dim = joint.shape
    query = torch.empty((rows, num_queries, dim), dtype=storage.dtype, device=joint.device)
    _rotate_and_store[heads, rows](
        joint.contiguous(), torch.view_as_real(rotation), query if norm is None else norm, storage, slots, query,
        storage.stride(0), storage.stride(1), epsilon,
        heads, num_queries, dim, triton.next_power_of_2(dim // 2), norm is not None,
        num_warps=1,  # a head is a few numbers a thread
    )  # fmt: skip
    return query


def silu_and_multiply(gate_up):
    """See `amusd.models.fused.silu_and_multiply`."""
    rows, columns = gate_up.shape
    product = torch.empty((rows, columns // 2), dtype=gate_up.dtype, device=gate_up.device)
    _silu_and_multiply[triton.cdiv(columns // 2, _BLOCK), rows](gate_up.contiguous(), product, columns // 2, _BLOCK)
    return product


def add_and_norm(hidden, parts, weight, epsilon):
    """See `amusd.models.fused.add_and_norm`."""
    rows, width = hidden.shape
    normed, padded = torch.empty_like(hidden), triton.next_power_of_2(width)
    num_parts = 0 if parts is None else len(parts)
    _add_and_norm[rows,](
        hidden, hidden if parts is None else parts, weight, normed, rows, epsilon, num_parts, width, padded,
        num_warps=max(1, min(16, padded // 512)),  # 16 columns a thread
    )  # fmt: skip
    return normed


# Strides make no variants: the model alone decides what is compiled.
@triton.jit(do_not_specialize=["storage_head", "storage_slot"], do_not_specialize_on_alignment=["slots"])
def _rotate_and_store(
    joint, rotation, norm, storage, slots, query,
    storage_head: tl.int64, storage_slot: tl.int64, epsilon,
    heads: tl.constexpr, num_queries: tl.constexpr, dim: tl.constexpr, padded: tl.constexpr, has_norm: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_rotated: tl.constexpr = num_queries + (heads - num_queries) // 2
    pair = tl.arange(0, padded)
    in_head = pair < dim // 2
    own = joint + (row * heads + head) * dim + 2 * pair
    first = tl.load(own, mask=in_head, other=0.0).to(tl.float32)
    second = tl.load(own + 1, mask=in_head, other=0.0).to(tl.float32)
    if head < num_rotated:
        if has_norm:
            scale = 1 / tl.sqrt(tl.sum(first * first + second * second, 0) / dim + epsilon)
            weights = norm + head * dim + 2 * pair
            first = first * scale * tl.load(weights, mask=in_head, other=0.0)
            second = second * scale * tl.load(weights + 1, mask=in_head, other=0.0)
        angle = rotation + row * dim + 2 * pair  # cosine, sine
        cosine = tl.load(angle, mask=in_head, other=0.0)
        sine = tl.load(angle + 1, mask=in_head, other=0.0)
        turned = first * cosine - second * sine
        second = first * sine + second * cosine
        first = turned
    if head < num_queries:
        place = query + (row * num_queries + head) * dim + 2 * pair
    else:
        place = storage + (head - num_queries) * storage_head + tl.load(slots + row) * storage_slot + 2 * pair
    tl.store(place, first.to(query.dtype.element_ty), mask=in_head)
    tl.store(place + 1, second.to(query.dtype.element_ty), mask=in_head)


@triton.jit(do_not_specialize=["rows"])
def _add_and_norm(
    hidden, parts, weight, normed, rows, epsilon,
    num_parts: tl.constexpr, width: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, padded)
    in_row = column < width
    place = row * width + column
    state = tl.load(hidden + place, mask=in_row, other=0.0).to(tl.float32)
    if num_parts > 0:
        total = tl.load(parts + place, mask=in_row, other=0.0).to(tl.float32)
        for rank in tl.static_range(1, num_parts):
            part = parts + (rank * rows + row) * width + column
            total += tl.load(part, mask=in_row, other=0.0).to(tl.float32)
        rounded = (total + state).to(hidden.dtype.element_ty)
        tl.store(hidden + place, rounded, mask=in_row)
        state = rounded.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(state * state, 0) / width + epsilon)
    factor = tl.load(weight + column, mask=in_row, other=0.0).to(tl.float32)
    tl.store(normed + place, (state * scale * factor).to(normed.dtype.element_ty), mask=in_row)


@triton.jit
def _silu_and_multiply(gate_up, product, columns, block: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * block + tl.arange(0, block)
    in_row = column < columns
    own = gate_up + row * 2 * columns + column
    gate = tl.load(own, mask=in_row, other=0.0).to(tl.float32)
    up = tl.load(own + columns, mask=in_row, other=0.0).to(tl.float32)
    tl.store(product + row * columns + column, (gate * tl.sigmoid(gate) * up).to(product.dtype.element_ty), mask=in_row)
