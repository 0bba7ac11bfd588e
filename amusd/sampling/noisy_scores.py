"""Scores, logit + scale * noise, whose argmax is a draw from softmax(logits / scale).

The noise is fixed by (seed, position, token id). The draft adds the same noise to its own logits, and guesses right
with probability (1 - TV) / (1 + TV) at least, TV being the distributions' total variation distance.

References: Daliri, Musco, Suresh 2024, Coupling without communication, https://arxiv.org/abs/2408.07978
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from amusd.sampling.noise import UNIT, Bits, counters, gumbel, noise_of, noise_of_rows
from amusd.sampling.operators import register_triton
from amusd.sampling.processors import Columns, Row, likely_columns

_FEW = 128
"""Columns that get noise first."""
_SLACK = 1e-6
"""Share by which the bound on counters is widened, for rounding."""


def noisy_argmax(logits: Tensor, codes: Tensor, keys: Tensor, scale: Tensor) -> Tensor:
    """int64 [rows]: the column with the largest score, the first of equal ones; a NaN comes before all others."""
    if logits.device.type != "cpu":
        scores: Tensor = noisy_scores(logits, codes, keys, scale)
        return scores.max(1).indices  # the first of equal ones, as documented
    each = zip(logits.numpy(), keys.tolist(), scale.tolist(), strict=True)
    return torch.tensor([choose(row, codes.numpy().view(np.uint32), key, factor) for row, key, factor in each])


def choose(logits: Row, codes: Bits, key: int, scale: float, left: Columns | None = None) -> int:
    """The column of one row with the largest score, on a CPU; the largest logit must be finite.

    `left`: the columns to choose from; None: all. The likeliest columns get noise first. Any other needs so much noise
    to win that few counters are small enough.
    """
    if scale == 0:
        return int(logits.argmax())
    columns = likely_columns(logits, _FEW) if left is None else left
    scores = logits[columns] + scale * noise_of(codes[columns], key)
    found = int(columns[scores.argmax()])
    noise_of_others = (scores.max() - logits[columns].min()) / scale
    if left is not None or len(columns) == len(logits):
        return found
    numbers = counters(codes, key)
    largest = -math.expm1(-math.exp(-noise_of_others)) / UNIT * (1 + _SLACK)
    able = np.append(np.flatnonzero(numbers <= np.uint32(min(largest, 2**32 - 1))), found)
    return int(able[(logits[able] + scale * gumbel(numbers[able])).argmax()])


@register_triton("amusd.sampling.noisy_scores_triton")
def noisy_scores(logits: Tensor, codes: Tensor, keys: Tensor, scale: Tensor) -> Tensor:
    """float32 [rows, columns]: `logits` [rows, columns] plus `scale` [rows] float32 times the noise.

    `codes` [columns] int32: `noise.codes_of` of the columns' tokens; `keys` [rows] int64. One Triton kernel on a GPU.
    """
    return torch.addcmul(logits.double(), noise_of_rows(codes, keys), scale.double().unsqueeze(1)).float()
