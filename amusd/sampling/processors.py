"""From logits to the distribution that is sampled: bias, penalties, temperature, top-k, top-p, min-p, in this order.

Operators over rows [rows, columns] of float32, of fixed shape on a GPU, so that they can be captured. What a row keeps
depends on that row alone: the order of a sum would move the border of top-p, so a GPU sums weights as integers, and a
CPU takes one row after another.

References:
    Order and meaning as in transformers' logits processors; penalties count as in vLLM: repetition over prompt and
    answer, presence and frequency over the answer.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from amusd.sampling.noisy_scores import Row

_CPU = "cpu"
_FIRST_REACH = 8.0
"""A CPU first looks at columns that are this much less likely than the likeliest one at most, in nats."""
_UNIT = 2.0**40
"""The weight of the likeliest column; 2^22 columns sum up to an int64."""


def penalized(
    logits: Tensor, counts: Tensor, in_prompt: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """`logits` [rows, columns] with penalties [rows, 1]; `counts`: of tokens in the answer."""
    written = counts > 0
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where(written | in_prompt, scaled, logits) - (written * presence + counts * frequency)


def filtered(logits: Tensor, words: Tensor) -> Tensor:
    """[rows, columns]: minus infinity for logits that the filters do not keep; ties with the last one stay.

    `words` int64 [rows, 4]: top_k, as many as there are columns for no such filter; then the bits of float64 numbers:
    top_p, above 1 for none; how much less than the largest a logit may be, below 0; and 1 / temperature.
    """
    if logits.device.type == _CPU:
        numbers = words.numpy()
        each = zip(logits.numpy(), numbers[:, 0].tolist(), numbers[:, 1:].view(np.float64).tolist(), strict=True)
        return torch.from_numpy(np.stack([_filtered_on_host(row, top_k, *others) for row, top_k, others in each]))
    top_k, (top_p, margin, sharpness) = words[:, :1], torch.split(floats(words[:, 1:]), 1, 1)
    values = logits.sort(1, descending=True).values
    least = values.gather(1, top_k - 1)
    weights = ((values - values[:, :1]) * sharpness).exp_().mul_(_UNIT).long().masked_fill(values < least, 0)
    together = weights.cumsum(1)
    count = (together - weights < top_p * together[:, -1:]).sum(1, keepdim=True)
    by_mass = values.gather(1, count.clamp(min=1) - 1)
    least = least.maximum(by_mass).maximum(values[:, :1] + margin)
    return logits.masked_fill(logits < least, -torch.inf)


def _filtered_on_host(row: Row, top_k: float, top_p: float, margin: float, sharpness: float) -> Row:
    """The same of one row on a CPU, where sorting a whole row would take longer than the rest together."""
    best = row.max()
    if not np.isfinite(best):
        return row
    is_cut, reach = top_k < len(row), _FIRST_REACH / sharpness
    mass = (
        0.0
        if is_cut or top_p > 1
        else top_p * float(np.exp((row - best) * np.float32(sharpness)).sum(dtype=np.float64))
    )
    while True:
        likely = row[row >= best - np.float32(reach)]
        weights = np.exp((likely - best) * np.float32(sharpness)).astype(np.float64)
        has_mass = weights.sum() >= mass if mass else is_cut or reach >= -margin
        if len(likely) == len(row) or (has_mass and (not is_cut or len(likely) >= top_k)):
            break
        reach *= 2
    order = np.argsort(-likely)
    values, weights = likely[order], weights[order]
    if is_cut:
        number = int((values >= values[int(top_k) - 1]).sum())
        values, weights = values[:number], weights[:number]
        mass = top_p * float(weights.sum())
    if top_p < 1:
        values = values[: max(1, int((np.cumsum(weights) - weights < mass).sum()))]
    kept: Row = np.where(row < max(values[-1], best + np.float32(margin)), np.float32(-np.inf), row)
    return kept


def floats(words: Tensor) -> Tensor:
    """float32 of the shape of `words`, which hold the bits of float64 numbers."""
    return words.view(torch.float64).float()
