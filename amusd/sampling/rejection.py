"""The ratio test: keep a candidate with probability min(1, p / q), else draw from what p has more than q.

p is the target's distribution at the candidate's position, q the one that the candidate was drawn from. The token is
then distributed as p, whatever q is, provided that four things hold (docs/sampling.md): q is what the draft really drew
from; whether a candidate is offered does not depend on its value; the three draws (draft, accept, resample) are
independent; and the candidate was drafted from the very prefix at which it is judged.

References:
    Leviathan, Kalman, Matias 2023, https://arxiv.org/abs/2211.17192; Chen et al. 2023, https://arxiv.org/abs/2302.01318
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from amusd.sampling.rows import ProbabilityRow

Probabilities = npt.NDArray[np.float64]


def is_accepted(token_id: int, p: Probabilities, q: ProbabilityRow, uniform: float) -> bool:
    """Whether a candidate stays; `uniform` in (0, 1) is its own. `p`: [ids]."""
    return bool(uniform * q.of(token_id) < p[token_id])


def residual(p: Probabilities, q: ProbabilityRow) -> Probabilities:
    """[ids]: what p has more than q, not normalised; p itself where that is nothing (then p and q are equal)."""
    left = p.copy()
    left[q.token_ids] -= q.probabilities
    np.maximum(left, 0.0, out=left)
    return left if left.any() else p
