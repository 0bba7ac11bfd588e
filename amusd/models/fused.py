"""Element-wise steps of a layer as one GPU kernel each, which saves launches and round trips to memory.

On CPUs the decoder works in place (`decoder.py`). The CPU kernels here are the reference of the Triton kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from amusd.sampling.operators import register_triton


@register_triton("amusd.models.fused_triton", mutates="storage")
def rotate_and_store(
    joint: Tensor,
    rotation: Tensor,
    norm: Tensor | None,
    storage: Tensor,
    slots: Tensor,
    num_queries: int,
    epsilon: float,
) -> Tensor:
    """Norm and rotate queries and keys, write keys and values into a cache; returns the queries.

    Args:
        joint: [rows, heads, dim]: query heads, then equally many key and value heads; rotated pairs side by side.
        rotation: [rows, dim / 2] complex64.
        norm: [query heads + key heads, dim] float32, weights of each head's norm; None: no norm.
        storage: [key heads + value heads, slots, dim] of one layer.
        slots: [rows] int64, where each row is written.
        num_queries: number of query heads.
        epsilon: added to the norm's mean square.

    Returns:
        [rows, query heads, dim] in the dtype of `storage`.
    """
    rows, heads, dim = joint.shape
    num_rotated = num_queries + (heads - num_queries) // 2
    rotated, values = torch.split(joint.float(), [num_rotated, heads - num_rotated], dim=1)
    if norm is not None:
        rotated = F.rms_norm(rotated, (dim,), None, epsilon) * norm
    pairs = torch.view_as_complex(rotated.reshape(rows, num_rotated, dim // 2, 2))
    rotated = torch.view_as_real(pairs * rotation.unsqueeze(1)).flatten(2)
    written = torch.cat((rotated[:, num_queries:], values), dim=1).transpose(0, 1)
    storage.index_copy_(1, slots, written.to(storage.dtype))
    return rotated[:, :num_queries].to(storage.dtype, memory_format=torch.contiguous_format)


@register_triton("amusd.models.fused_triton")
def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """[rows, 2 * n] -> [rows, n]: silu of the first half, times the second, in float32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return F.silu(gate).mul_(up).to(gate_up.dtype)


@register_triton("amusd.models.fused_triton", mutates="hidden")
def add_and_norm(hidden: Tensor, parts: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """Add `parts`, if any, to `hidden` [rows, width] as `add_parts` does; returns the RMS norm of the sum."""
    if parts is not None:
        add_parts(hidden, parts)
    return F.rms_norm(hidden.float(), weight.shape, weight.float(), epsilon).to(hidden.dtype)


def add_parts(hidden: Tensor, parts: Tensor) -> None:
    """Add the float32 sum of `parts` [ranks, rows, width], in rank order, to `hidden` [rows, width]."""
    first, *others = parts
    total = first.float()
    for other in others:
        total = total + other
    hidden.copy_(total + hidden)
