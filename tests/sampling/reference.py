"""The definition of sampling in float64, one token at a time: the reference for the sampler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from amusd.config import Distribution
from amusd.sampling.noise import Domain, codes_of, key_of, noise_of

Row = npt.NDArray[np.float64]


def processed(
    distribution: Distribution,
    logits: Sequence[float],
    prompt: Sequence[int] = (),
    answer: Sequence[int] = (),
    ids: Sequence[int] | None = None,
) -> Row:
    """[columns]: logits after bias, penalties, temperature and filters, minus infinity for what filters take away.

    `ids`: the token that each column scores.
    """
    row = np.array(logits, dtype=np.float64)
    ids = range(len(row)) if ids is None else ids
    for column, token_id in enumerate(ids):
        row[column] += sum(bias for biased, bias in distribution.logit_bias if biased == token_id)
        if token_id in (*prompt, *answer):
            penalty = distribution.repetition_penalty
            row[column] = row[column] / penalty if row[column] > 0 else row[column] * penalty
        number = list(answer).count(token_id)
        row[column] -= distribution.frequency_penalty * number + distribution.presence_penalty * (number > 0)
    if distribution.temperature == 0:
        return row
    row /= distribution.temperature
    if 0 < distribution.top_k < len(row):
        row[row < np.sort(row)[-distribution.top_k]] = -np.inf
    if distribution.top_p < 1:
        order = np.argsort(-row, kind="stable")
        chances = softmax(row)[order]
        least = row[order[(np.cumsum(chances) - chances < distribution.top_p).sum() - 1]]
        row[row < least] = -np.inf
    if distribution.min_p > 0:
        row[row < row.max() + np.log(distribution.min_p)] = -np.inf
    return row


def softmax(row: Row) -> Row:
    """[columns]: probabilities."""
    weights = np.exp(row - row.max())
    found: Row = weights / weights.sum()
    return found


def noise(seed: int, position: int, ids: Sequence[int]) -> Row:
    """[ids]: the noise of matching."""
    codes = codes_of(max(ids) + 1).numpy().view(np.uint32)[list(ids)]
    return noise_of(codes, key_of(seed, position, Domain.MATCHING))
