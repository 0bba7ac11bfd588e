"""From logits to the sampled distribution: bias, penalties, temperature, top-k, top-p, min-p, in this order.

A GPU sums integers, since the order of a sum of floats would move top-p's border. A CPU computes row after row, likely
columns first.

References: Order and meaning as in transformers' logits processors; penalties count as in vLLM: repetition over prompt
and answer, presence and frequency over the answer.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from amusd.sampling.sampler_inputs import SamplerInputs

Row = npt.NDArray[np.float32]
"""[columns]."""
Columns = npt.NDArray[np.intp]
_SOME, _STRIDE = 512, 16
"""Number of columns examined first; a sample of every 16th finds the border."""
_GROUPS = 512
"""Most groups of columns in `largest_columns`."""
_UNIT = 2.0**40
"""The weight of the likeliest column; an int64 holds sums of 2^22 columns."""


def penalized(xp: Any, logits: Any, prompt: Any, answer: Any, repetition: Any, presence: Any, frequency: Any) -> Any:
    """Logits with penalties, by the functions of `xp`: numpy or torch. `prompt`, `answer`: token counts."""
    scaled = xp.where(logits > 0, logits / repetition, logits * repetition)
    seen = xp.where(xp.logical_or(prompt, answer), scaled, logits)
    return seen - xp.clip(answer, 0, 1) * presence - answer * frequency


def filtered(logits: Tensor, inputs: SamplerInputs) -> Tensor:
    """[rows, columns]: minus infinity for filtered logits; ties with the last kept logit stay."""
    given = inputs.last, inputs.top_p, inputs.margin, inputs.sharpness
    last, top_p, margin, sharpness = (each.unsqueeze(1) for each in given)
    values = logits.sort(1, descending=True).values
    largest = values[:, :1]
    weights = ((values - largest) * sharpness).exp_().mul_(_UNIT).long().masked_fill(values < values.gather(1, last), 0)
    flat = weights.flatten().cumsum(0).view_as(weights)  # one flat sum, which torch spreads over a GPU
    together = flat - (flat[:, :1] - weights[:, :1])
    by_mass = (together < top_p * together[:, -1:]).sum(1, keepdim=True)
    least = values.gather(1, last.minimum(by_mass)).maximum(largest + margin)
    return logits.masked_fill(logits < least, -torch.inf)


def kept_columns(row: Row, inputs: SamplerInputs) -> Columns | None:
    """Columns of a row that `filtered` keeps, found on a CPU; None: all."""
    last, best = int(inputs.last), row.max()
    top_p, margin, sharpness = float(inputs.top_p), float(inputs.margin), float(inputs.sharpness)
    is_cut, total = last < len(row) - 1, 0.0
    if not (is_cut or top_p < 1 or margin > -np.inf):
        return None

    if top_p < 1 and not is_cut:
        total = float(torch.from_numpy((row - best) * np.float32(sharpness)).exp_().sum())  # in half of numpy's time
    columns = likely_columns(row)
    while True:
        values = np.sort(row[columns])[::-1]
        place = min(last, len(values) - 1)
        if top_p < 1:
            weights = np.exp((values - best) * sharpness, dtype=np.float64)
            if is_cut:
                total = weights[values >= values[place]].sum()
            place = min(place, int((weights.cumsum() < top_p * total).sum()))
        least = max(values[place], best + np.float32(margin))
        if len(columns) == len(row) or (least > values[-1] and (last < len(values) or not is_cut)):
            left: Columns = columns[row[columns] >= least]
            return left
        columns = np.arange(len(row))


def likely_columns(row: Row, num_columns: int = _SOME) -> Columns:
    """About `num_columns` columns with the largest logits, with ties."""
    some, place = row[::_STRIDE], num_columns // _STRIDE
    if len(some) <= place:
        return np.arange(len(row))
    return np.flatnonzero(row >= np.partition(some, -place)[-place])


def largest_columns(rows: Tensor, num_largest: int) -> tuple[Tensor, Tensor]:
    """Values and columns [rows, num_largest] of each row's largest logits, the largest first.

    A CPU searches the groups of columns with the largest maxima, in a quarter of `topk`'s time.
    """
    num_rows, num_columns = rows.shape
    width = math.gcd(num_columns, _GROUPS)
    if rows.device.type != "cpu" or width < num_largest:
        found = rows.topk(num_largest, 1)
        return found.values, found.indices
    columns = rows.view(num_rows, -1, width)  # each group is a column
    groups = columns.amax(1).topk(num_largest, 1).indices  # [rows, num_largest]
    likely = columns.gather(2, groups.unsqueeze(1).expand(-1, columns.shape[1], -1)).flatten(1)
    found = likely.topk(num_largest, 1)
    return found.values, found.indices // num_largest * width + groups.gather(1, found.indices % num_largest)
