"""Attention of a few rows over many keys: chains, trees and several sequences in one operator of fixed shapes.

A row sees the positions `[first, position]` of its path; `first` is 0 without a window. The sequence's slot table has
the slots of positions below its length; the row's branch has the others. The order in which keys are summed depends on
positions alone, so a row's bits depend only on its query and its path's keys and values.

No shape depends on the context and the host reads nothing, so the operator can be captured. It is a Triton kernel on a
GPU (`row_attention_triton.py`), elsewhere plain torch. Masked positions add exact zeros, so keys and values that any
row sees must be finite; other slots may hold anything.

References: online softmax, 1805.02867; split keys, https://crfm.stanford.edu/2023/10/12/flashdecoding.html; sums that
do not depend on the batch, https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from amusd.sampling.operators import register_triton

BLOCK = 64
SPLIT = 4 * BLOCK
"""Positions of a split, summed apart from others, so that many multiprocessors share a long context."""
NUM_NEAR = 16
"""Number of first splits of one block: short contexts occupy many multiprocessors, too."""


def num_splits(num_positions: int) -> int:
    """Number of splits of the first `num_positions` positions on a GPU."""
    near = min(num_positions, NUM_NEAR * BLOCK)
    return -(-near // BLOCK) - (-(num_positions - near) // SPLIT)


@register_triton("amusd.models.row_attention_triton")
def attend_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    branches: Tensor,
    row_paths: Tensor,
    positions: Tensor,
    scaling: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    firsts: Tensor | None = None,
) -> Tensor:
    """Attention of each row over the keys of its path; returns [seqs, rows, heads, dim] in the dtype of `query`.

    Args:
        query: [seqs, rows, heads, dim], after rotation.
        keys: [key_heads, slots, dim]; `heads` is a multiple of `key_heads`. The pass's own keys are written already.
        values: [key_heads, slots, dim].
        table: [seqs, width] int64, the slot of each position below the length. Every position is less than `width`.
        lengths: [seqs] int64; positions below this are read through `table`.
        branches: [seqs, paths, depth] int64, the slot of position `length + j` on each path. Entries that no row of
            the path sees are not used.
        row_paths: [seqs, rows] int64, the path of each row. Not used where every position is below the length.
        positions: [seqs, rows] int64; -1 is a padded row, whose result is 0.
        scaling: factor of the scores.
        softcap: scores become `softcap * tanh(scores / softcap)`; 0 leaves them.
        sinks: [heads], a further score without a value in each softmax; padded rows stay 0.
        firsts: [seqs, rows] int64, the first position that each row sees, perhaps below 0; None: 0.
    """
    slots, seen = _slots_of_paths(table, lengths, branches, row_paths, positions, firsts)
    weights, total = _weigh(query, keys[:, slots].float(), seen, scaling, softcap, sinks)
    seen_values = values[:, slots].float().masked_fill(~seen.unsqueeze(-1), 0.0)  # [key_heads, seqs, rows, width, dim]
    result = _dot(weights.unsqueeze(-2), seen_values.mT.unsqueeze(-3)) / total.masked_fill(total == 0, 1.0)
    return result.permute(1, 2, 0, 3, 4).to(query.dtype).contiguous().view(query.shape)


def _weigh(
    query: Tensor, keys: Tensor, seen: Tensor, scaling: float, softcap: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """float32 weights of each row's `keys` [key_heads, seqs, rows, width, dim], and their sums [.., group, 1]."""
    seqs, rows, heads, dim = query.shape
    key_heads = keys.shape[0]
    folded = query.float().mul(scaling).view(seqs, rows, key_heads, heads // key_heads, dim).permute(2, 0, 1, 3, 4)
    scores = _dot(folded.unsqueeze(-2), keys.unsqueeze(-3))  # [key_heads, seqs, rows, group, width]
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen.unsqueeze(-2), -torch.inf)
    maximum = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    sunk = None if sinks is None else sinks.float().view(key_heads, 1, 1, -1, 1)
    if sunk is not None:
        maximum = torch.maximum(maximum, sunk)
    weights = torch.exp(scores - maximum)
    return weights, _fold(weights).unsqueeze(-1) + (0.0 if sunk is None else torch.exp(sunk - maximum))


def _slots_of_paths(
    table: Tensor, lengths: Tensor, branches: Tensor, row_paths: Tensor, positions: Tensor, firsts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The slot of each position for each row, and whether the row sees it; both [seqs, rows, width]."""
    wanted = torch.arange(table.shape[1], device=table.device)
    seen = wanted <= positions.unsqueeze(-1)
    if firsts is not None:
        seen &= wanted >= firsts.unsqueeze(-1)
    slots = table.unsqueeze(1)
    if branches.numel():
        beyond = (wanted - lengths.unsqueeze(-1)).unsqueeze(1)  # [seqs, 1, width]
        sequence = torch.arange(len(table), device=table.device).view(-1, 1, 1)
        path = row_paths.clamp(0, branches.shape[1] - 1).unsqueeze(-1)
        slots = torch.where(beyond < 0, slots, branches[sequence, path, beyond.clamp(0, branches.shape[2] - 1)])
    return torch.where(seen, slots, 0), seen


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return _fold(left * right)


def _fold(terms: Tensor) -> Tensor:
    """Sums of the last dimension in an order that further zeros do not change."""
    size = 1 << (terms.shape[-1] - 1).bit_length()
    terms = F.pad(terms, (0, size - terms.shape[-1]))
    while size > 1:
        size //= 2
        terms = terms[..., :size] + terms[..., size:]
    return terms.squeeze(-1)
