"""Attention for transformers models over a position-addressed cache: any number of rows, one explicit mask.

Two things transformers' own functions do not do: queries may have another dtype than the cache (on a CPU, bfloat16
attention is several times slower than float32), and grouped heads are folded into the rows instead of copying keys.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

ATTENTION_NAME = "amusd"
"""Under which name transformers knows `attend`."""

_MOST_ROWS_KEPT = 32  # wider ones are prompt chunks: of many lengths, and not slowed down by a copy


def register_attention() -> str:
    """Make `attend` known to transformers, and return its name. Repeating it changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attend)
    return ATTENTION_NAME


def attend_grouped(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float | None, dtype: torch.dtype
) -> Tensor:
    """Attention of [rows, heads, dim] over [1, key_heads, keys, dim]; returns [rows, heads * value_dim] in `dtype`.

    Computed in the dtype of `keys`. The query heads that share a key head stand among the rows of one product, so keys
    and values are read once and never expanded. `mask` is additive, [1, heads / key_heads, rows, keys].
    """
    rows, heads, dim = query.shape
    key_heads = keys.shape[1]
    groups = heads // key_heads
    folded = query.to(keys.dtype).view(rows, key_heads, groups, dim).permute(1, 2, 0, 3)
    folded = folded.reshape(1, key_heads, groups * rows, dim)
    output = F.scaled_dot_product_attention(
        folded, keys, values, mask.view(1, 1, groups * rows, -1), scale=scaling
    )  # [1, key_heads, groups * rows, value_dim]
    rows_first = output.view(key_heads, groups, rows, -1).permute(2, 0, 1, 3)
    return rows_first.to(dtype, memory_format=torch.contiguous_format).reshape(rows, -1)


class CausalMask:
    """Additive causal masks of every position as slices of one buffer.

    Row `i` of the buffer is `0` up to column `size + i` and `-inf` beyond it; the mask of rows at `start` over `keys`
    is the slice of columns `[size - start, size - start + keys)`.
    """

    def __init__(self, *, max_rows: int, size: int, groups: int, dtype: torch.dtype, device: torch.device) -> None:
        """`size`: positions at most; `groups`: query heads that share a key head."""
        columns = torch.arange(2 * size, device=device)
        rows = torch.arange(max_rows, device=device).unsqueeze(1)
        self._buffer = torch.zeros((max_rows, 2 * size), dtype=dtype, device=device)
        self._buffer.masked_fill_(columns > rows + size, -torch.inf)  # [max_rows, 2 * size]
        self._size = size
        self._groups = groups
        self._repeated: dict[int, Tensor] = {}  # for few rows: the buffer once per group, so that a slice is a view

    def at(self, start: int, rows: int, num_keys: int) -> Tensor:
        """The mask [1, groups, rows, num_keys] of rows `[start, start + rows)` over the first keys.

        Its groups and rows can be viewed as one dimension. Masks of few rows share memory: do not write to them.
        """
        first = self._size - start
        if rows > _MOST_ROWS_KEPT:
            mask = self._buffer[:rows, first : first + num_keys].repeat(self._groups, 1)
        else:
            if rows not in self._repeated:
                self._repeated[rows] = self._buffer[:rows].repeat(self._groups, 1)
            mask = self._repeated[rows].narrow(1, first, num_keys)
        return mask.view(1, self._groups, rows, num_keys)  # from [groups * rows, num_keys]


def attend(
    module: torch.nn.Module,  # noqa: ARG001 - the signature is transformers'
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001 - inference only
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of [1, heads, rows, dim] over [1, key_heads, keys, dim]; returns [1, rows, heads, value_dim].

    Computed in the dtype of `key`. `softcap` and `s_aux` (one attention sink per head) are those of transformers.
    """
    if attention_mask is None:
        raise ValueError("this attention function needs an explicit mask")
    _, heads, rows, dim = query.shape
    key_heads = key.shape[1]
    groups = heads // key_heads
    # One copy converts and packs; the second call copies only if the dtype was right already.
    query_packed = query.to(key.dtype, memory_format=torch.contiguous_format).contiguous()
    folded = query_packed.view(1, key_heads, groups * rows, dim)
    if attention_mask.shape[1] != groups:
        attention_mask = attention_mask[:, :1].expand(-1, groups, -1, -1)
    mask = attention_mask.reshape(1, 1, groups * rows, -1)
    if softcap is None and s_aux is None:
        output = F.scaled_dot_product_attention(folded, key, value, mask, scale=scaling)
    else:
        sinks = None if s_aux is None else s_aux.view(1, key_heads, groups, 1).expand(-1, -1, -1, rows)
        output = _attend_explicitly(folded, key, value, mask, scaling, softcap, sinks)
    return output.view(1, heads, rows, -1).transpose(1, 2).to(query.dtype), None


def _attend_explicitly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """What the fused kernel cannot do: scores bounded by `softcap`, and `sinks` [1, key_heads, groups, rows]."""
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask  # [1, key_heads, groups * rows, keys]
    if sinks is not None:
        scores = torch.cat((scores, sinks.reshape(*scores.shape[:3], 1).to(scores.dtype)), dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value
