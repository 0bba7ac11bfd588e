"""From logits to the distribution that is sampled: bias, penalties, temperature, top-k, top-p, min-p, in this order.

Operators over rows [rows, columns] of float32, of fixed shape on a GPU, so that they can be captured. What a row keeps
depends on that row alone: the order of a sum would move the border of top-p, so weights are summed as integers.

References:
    Order and meaning as in transformers' logits processors; penalties count as in vLLM: repetition over prompt and
    answer, presence and frequency over the answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CPU = "cpu"
_LOOKED_AT = (128, 2048)
"""The likeliest columns that a CPU looks at before it sorts a whole row."""
_UNIT = 2.0**40
"""The weight of the likeliest column; 2^22 columns sum up to an int64."""


def penalized(
    logits: Tensor, counts: Tensor, in_prompt: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """`logits` [rows, columns] with penalties [rows, 1]; `counts`: of tokens in the answer."""
    written = counts > 0
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where(written | in_prompt, scaled, logits) - (written * presence + counts * frequency)


def least_kept(logits: Tensor, top_k: Tensor, top_p: Tensor, margin: Tensor, sharpness: Tensor) -> Tensor:
    """[rows, 1]: the smallest logit that the filters keep; ties with it stay.

    Parameters [rows, 1]. `top_k`: int64, as many as there are columns for no such filter; `top_p`: above 1 for none;
    `margin`: how much less than the largest a logit may be, as a number below 0; `sharpness`: 1 / temperature. A GPU
    sorts each row. A CPU looks at the likeliest columns first, and at the whole row if these do not settle it.
    """
    num_columns = logits.shape[1]
    if logits.device.type != _CPU:
        return _least_of(logits.sort(1, descending=True).values, None, top_k, top_p, margin, sharpness)[0]
    total = None
    if bool((top_p < 1).any()):
        total = _weights(logits, logits.amax(1, keepdim=True), sharpness).sum(1, keepdim=True)
    for number in (*(each for each in _LOOKED_AT if each < num_columns), num_columns):
        values = logits.topk(number, 1).values
        least, has_mass = _least_of(values, total, top_k, top_p, margin, sharpness)
        is_last = has_mass | (values[:, -1:] < values[:, :1] + margin)
        if bool(((top_k <= number) | (top_k == num_columns) & is_last).all()):
            break
    return least


def _least_of(
    values: Tensor, total: Tensor | None, top_k: Tensor, top_p: Tensor, margin: Tensor, sharpness: Tensor
) -> tuple[Tensor, Tensor]:
    """`least_kept` by the largest logits of each row in falling order, and bool [rows, 1]: they have the mass of top-p.

    `total` int64 [rows, 1]: the weights of all columns, if `values` may not be all of them and there is a `top_p`.
    """
    number = values.shape[1]
    least = values.gather(1, top_k.clamp(max=number) - 1)
    weights = _weights(values, values[:, :1], sharpness).masked_fill(values < least, 0)
    together = weights.cumsum(1)
    kept = together[:, -1:]
    if total is not None:
        kept = torch.where(top_k > number, total, kept)
    count = (together - weights < top_p * kept).sum(1, keepdim=True)
    by_mass = values.gather(1, count.clamp(min=1) - 1)
    return least.maximum(by_mass).maximum(values[:, :1] + margin), together[:, -1:] >= top_p * kept


def _weights(values: Tensor, best: Tensor, sharpness: Tensor) -> Tensor:
    """int64: exp((value - best) * sharpness) in units of 2^-40."""
    return ((values - best) * sharpness).exp_().mul_(_UNIT).long()
