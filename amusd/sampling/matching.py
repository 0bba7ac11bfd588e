"""Shared-noise matching: each token is the argmax of processed logits plus noise fixed by (seed, position, token id).

Adding standard Gumbel noise and taking the argmax samples from the softmax. The target's token at a position is thus a
function of its logits and of the request's seed: which candidates arrived, how many, from whom and when decides only
how many tokens one pass confirms. The draft adds the same noise to its own logits, and so guesses right more often than
independent draws would: with probability (1 - TV) / (1 + TV) at least, TV being the distance of the distributions.

References:
    Daliri, Musco, Suresh 2024, Coupling without communication, https://arxiv.org/abs/2408.07978
"""

from __future__ import annotations

import math

import numpy as np

from amusd.sampling.logits import Columns, Row
from amusd.sampling.noise import Counters, counters, gumbel

_BITS_TO_LOG = np.float32(math.log(2) * 2.0**-23)
_LEFT_OUT = math.log(2) * (127 + 32)
"""The part of every bound that is the same for all columns."""
_SLACK, _SLACK_PER_LOGIT = 1e-3, 1e-6
"""Covers the float32 rounding of the bound."""
_MOST_TRIES = 6
"""Columns looked at one by one, before all that can still win are looked at together."""


class NoisyArgmax:
    """The column with the largest processed logit plus Gumbel noise, in float64; the first of equal ones.

    Exact, but two logarithms are taken for the few columns only that can win: -log(-log(1 - v)) is below -log(v), and
    that below a straight line through the bits of v as a float32.
    """

    def __init__(self, codes: Counters) -> None:
        """`codes` [columns]: of the tokens that the columns score."""
        self._codes = codes
        self._noise, self._scratch = np.empty_like(codes), np.empty_like(codes)
        self._bits, self._bound = np.empty((2, len(codes)), dtype=np.float32)

    def __call__(self, row: Row, columns: Columns | None, key: int) -> int:
        """The column chosen from the processed logits [columns], where only `columns` are left unless None."""
        if columns is not None:
            scores = row[columns].astype(np.float64) + gumbel(counters(key, self._codes[columns]))
            return int(columns[scores.argmax()])
        noise = counters(key, self._codes, self._noise, self._scratch)
        bits, bound = self._bits, self._bound
        np.copyto(bits, noise, casting="unsafe")
        np.copyto(bound, bits.view(np.int32), casting="unsafe")
        np.multiply(bound, -_BITS_TO_LOG, out=bound)
        np.add(bound, row, out=bound)
        return self._best(row, noise, bound)

    def _best(self, row: Row, noise: Counters, bound: Row) -> int:
        """The largest score among all columns, `bound` [columns] and `_LEFT_OUT` together being above each of them."""
        best, best_score = 0, -math.inf
        for _ in range(_MOST_TRIES):
            column = int(bound.argmax())
            if not bound[column] >= _least(best_score):  # nor if it is no number
                return best if best_score > -math.inf else column
            score = float(row[column]) + float(gumbel(noise[column : column + 1])[0])
            if score > best_score or (score == best_score and column < best):
                best, best_score = column, score
            bound[column] = -np.inf
        able = np.flatnonzero(bound >= _least(best_score))
        able = np.union1d(able, [best])
        scores = row[able].astype(np.float64) + gumbel(noise[able])
        return int(able[scores.argmax()])


def _least(score: float) -> float:
    """Bounds below this belong to columns that cannot reach `score`."""
    return score - _LEFT_OUT - (_SLACK + _SLACK_PER_LOGIT * abs(score) if score > -math.inf else 0.0)
