"""Attention of one pass, which each layer calls with its own queries, keys and values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from amusd.models.row_attention import attend_rows

ATTENTION_NAME = "amusd"
Position = TypeVar("Position", int, Tensor)


@dataclass(frozen=True)
class Window:
    """How far back the rows of a layer see."""

    size: int
    is_chunk: bool = False
    """True: a row sees its own chunk of `size` positions. False: the last `size` positions."""

    def __getitem__(self, _rows: object) -> Window:
        """Return `self`: transformers slices its masks."""
        return self

    def first(self, position: Position) -> Position:
        """First position that the row at `position` sees, perhaps below 0."""
        return position - (position % self.size if self.is_chunk else self.size - 1)


class AttentionInputs(NamedTuple):
    """The inputs of attention in one layer."""

    query: Tensor
    """[rows, heads, dim]."""
    keys: Tensor
    """[key_heads, slots, dim]: the whole memory. Neighbouring query heads share a key head."""
    values: Tensor
    """[key_heads, slots, dim]."""
    scaling: float
    softcap: float | None = None
    """Bound of the scores, as in transformers."""
    sinks: Tensor | None = None
    """[heads]: scores without a value, as in transformers."""
    window: Window | None = None
    """None: each row sees all positions up to its own."""

    @property
    def is_plain(self) -> bool:
        """True without softcap and sinks: fused kernels lack both."""
        return self.softcap is None and self.sinks is None


Attention: TypeAlias = Callable[[AttentionInputs], Tensor]
"""Attention of a pass's rows over the slots that each sees: [rows, heads, dim] in the keys' dtype."""

attention_of_pass: ContextVar[Attention] = ContextVar("attention_of_pass")
"""Attention of the running pass, read by `attend`, as some models of transformers pass no more arguments."""


def attend_masked(layer: AttentionInputs, visible: Tensor) -> Tensor:
    """Attention to the slots in `visible` [rows, end], whatever the layer's window."""
    query, keys, values, scaling, softcap, sinks, _ = layer
    keys, values = keys[:, : visible.shape[1]], values[:, : visible.shape[1]]
    rows, heads, dim = query.shape
    key_heads = keys.shape[0]
    groups = heads // key_heads
    # The heads of a group are rows of one product, so keys and values are read once and never expanded.
    folded = query.to(keys.dtype).view(rows, key_heads, groups, dim).permute(1, 2, 0, 3)
    folded = folded.reshape(1, key_heads, groups * rows, dim)
    mask = additive(visible, keys.dtype).repeat(1, groups, 1).unsqueeze(0)
    keys, values = keys.unsqueeze(0), values.unsqueeze(0)
    if layer.is_plain:
        output = F.scaled_dot_product_attention(folded, keys, values, mask, scale=scaling)
    else:
        scores = folded @ keys.transpose(2, 3) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores + mask  # [1, key_heads, groups * rows, slots]
        if sinks is not None:
            by_row = sinks.view(key_heads, groups, 1).expand(-1, -1, rows).reshape(*scores.shape[:3], 1)
            scores = torch.cat((scores, by_row.to(scores.dtype)), dim=-1)
        weights = scores.softmax(dim=-1, dtype=torch.float32)[..., : keys.shape[2]]
        output = weights.to(values.dtype) @ values
    return output.view(key_heads, groups, rows, -1).permute(2, 0, 1, 3).flatten(1, 2)


def causal_attention(start: int, rows: int, first: int = 0) -> Attention:
    """Causal attention of a sequence's last rows; for many rows on a GPU.

    `start`: position of the first row; `first`: slot of position 0.
    """
    end, bias = start + rows, None
    if start:
        from torch.nn.attention.bias import causal_lower_right  # loads torch's compiler: a second of start-up

        bias = causal_lower_right(rows, end)

    def attend_causally(layer: AttentionInputs) -> Tensor:
        window = layer.window
        is_cut = window is not None and window.first(end - 1) > 0
        low = max(0, window.first(start)) if window is not None and is_cut else 0
        slots = slice(first + low, first + end)
        query, keys, values = layer.query, layer.keys[:, slots], layer.values[:, slots]
        if is_cut or not layer.is_plain:
            positions = torch.arange(low, end, device=keys.device)
            own = positions[start - low :].unsqueeze(1)
            visible = positions <= own
            if window is not None:
                visible &= positions >= window.first(own)
            return attend_masked(layer._replace(keys=keys, values=values), visible)
        output = F.scaled_dot_product_attention(
            query.to(keys.dtype).transpose(0, 1).unsqueeze(0),  # [1, heads, rows, dim]
            keys.unsqueeze(0),
            values.unsqueeze(0),
            bias,
            is_causal=bias is None,
            scale=layer.scaling,
            enable_gqa=True,
        )
        return output[0].transpose(0, 1)

    return attend_causally


def attend_to_chains(chains: Sequence[tuple[int, int, int]]) -> Attention:
    """Causal attention of several sequences' last rows, each by `causal_attention(start, rows, first)`."""
    each, sizes = [causal_attention(*chain) for chain in chains], [rows for _, rows, _ in chains]

    def attend_each(layer: AttentionInputs) -> Tensor:
        queries = torch.split(layer.query, sizes)
        return torch.cat([own(layer._replace(query=query)) for own, query in zip(each, queries, strict=True)])

    return attend_each


def attend_by_table(
    table: Tensor, lengths: Tensor, branches: Tensor, row_paths: Tensor, positions: Tensor
) -> Attention:
    """`attend_rows` as an `Attention`: a few neighbouring rows of each sequence."""
    where = table, lengths, branches, row_paths, positions
    firsts = functools.cache(lambda window: None if window is None else window.first(positions))

    def attend_along_paths(layer: AttentionInputs) -> Tensor:
        query, keys, values, scaling, softcap, sinks, window = layer
        by_sequence = query.to(keys.dtype).view(*positions.shape, *query.shape[1:])
        output: Tensor = attend_rows(by_sequence, keys, values, *where, scaling, softcap or 0.0, sinks, firsts(window))
        return output.flatten(0, 1)

    return attend_along_paths


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, rows, slots]: 0 where `visible` [rows, slots], minus infinity elsewhere."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, -torch.inf).unsqueeze(0)


def register_attention() -> str:
    """Register `attend` with transformers, and return its name. Idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, attend)
    AttentionMaskInterface.register(ATTENTION_NAME, window_of_mask)
    return ATTENTION_NAME


def window_of_mask(
    *, config: Any, local_size: int | None = None, use_vmap: bool = False, **named: Any
) -> Window | None:
    """The window of a layer; models of transformers pass it to the layer as its mask.

    Raises `ValueError` for a mask that is not causal. The arguments' names are transformers'.
    """
    if use_vmap or "allow_is_bidirectional_skip" in named:
        raise ValueError("the mask of its attention is not causal")
    if local_size is None:
        return None
    return Window(local_size, is_chunk=local_size != getattr(config, "sliding_window", None))


def attend(
    module: torch.nn.Module,  # noqa: ARG001 - the signature is transformers'
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Window | None,
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001 - inference only
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of [1, heads, rows, dim] over [1, key_heads, slots, dim]; returns [1, rows, heads, dim of a value].

    `attention_mask`: from `window_of_mask`. The arguments' names are transformers'.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    value_dim = value.shape[3]
    if key.device.type == "cpu":  # expanded latents are in the model's dtype
        key, value = key.float(), value.float()
    if missing := key.shape[3] - value_dim:  # latent attention
        key, value = key.contiguous(), F.pad(value, (0, missing))
    query = query[0].transpose(0, 1)
    output = attention_of_pass.get()(AttentionInputs(query, key[0], value[0], scaling, softcap, s_aux, attention_mask))
    output = output[..., :value_dim]
    return output.to(query.dtype).contiguous().unsqueeze(0), None  # some models call `view`
