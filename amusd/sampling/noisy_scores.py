"""Scores, logit + scale * noise, and the column with the largest one: a draw from softmax(logits / scale).

With scale 0 it is the largest logit. The noise is fixed by (seed, position, token id), so the target's token at a
position is a function of its logits and of the request's seed: which candidates arrived, how many, from whom and when
decides only how many tokens a pass confirms. The draft adds the same noise to its own logits, and guesses right with
probability (1 - TV) / (1 + TV) at least, TV being the total variation distance of the two distributions.

References:
    Daliri, Musco, Suresh 2024, Coupling without communication, https://arxiv.org/abs/2408.07978
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from amusd.sampling.noise import Bits, counters, counters_on_host, gumbel, gumbel_on_host

Row = npt.NDArray[np.float32]
"""[columns]."""
_CPU = "cpu"
_BITS_TO_LOG = math.log(2) * 2.0**-23
_ABOVE_LINE = math.log(2) * (127 + 32) + 1e-3
"""No noise is above the line of `_choose` by more than this."""
_FEW = 1000
"""Columns that are scored without a look at bounds."""
_SLACK = 1e-6
"""Covers the rounding of a logit, relative to the best score."""


def noisy_argmax(logits: Tensor, codes: Tensor, keys: Tensor, scale: Tensor) -> Tensor:
    """int64 [rows]: the column with the largest score; of equal ones the first, a NaN before all others.

    Parameters as of `noisy_scores`. A row's column depends on that row alone. Waits for no device.
    """
    if logits.device.type != _CPU:
        scores: Tensor = noisy_scores(logits, codes, keys, scale)
        return scores.max(1).indices  # the first of equal ones, as documented
    rows, bits = logits.float().numpy(), codes.numpy().view(np.uint32)
    each = zip(rows, keys.tolist(), scale.tolist(), strict=True)
    return torch.tensor([_choose(row, bits, key, factor) for row, key, factor in each])


def _choose(logits: Row, codes: Bits, key: Sequence[int], scale: float) -> int:
    """The same of one row on a CPU, where two logarithms are taken for the few columns only that can win.

    The noise -log(-log(1 - v)) is less than -log(v), and that is less than a straight line through the bits of v.
    """
    best = int(logits.argmax())
    if scale == 0 or not np.isfinite(logits[best]):
        return best
    left = np.flatnonzero(logits > -np.inf)
    if len(left) < _FEW:  # behind a filter
        noise = gumbel_on_host(counters_on_host(codes[left], key))
        return int(left[(logits[left] + scale * noise).argmax()])
    numbers = counters_on_host(codes, key)
    score = logits[best] + scale * gumbel_on_host(numbers[best])
    bound = numbers.astype(np.float32)
    np.copyto(bound, bound.view(np.int32), casting="unsafe")
    bound *= np.float32(-_BITS_TO_LOG * scale)
    bound += logits
    able = np.flatnonzero(bound >= score - scale * _ABOVE_LINE - _SLACK * abs(score))
    return int(able[(logits[able] + scale * gumbel_on_host(numbers[able])).argmax()])


@torch.library.custom_op("amusd::noisy_scores", mutates_args=(), device_types="cpu")
def noisy_scores(logits: Tensor, codes: Tensor, keys: Tensor, scale: Tensor) -> Tensor:
    """float32 [rows, columns]: `logits` [rows, columns] plus `scale` [rows] float32 times the noise.

    `codes` [columns] int32: `noise.codes_of` the tokens that the columns score; `keys` [rows, 2] int32: the halves of
    each row's key. One Triton kernel on a GPU, a chain of torch's operators elsewhere.
    """
    return compose_noisy_scores(logits, codes, keys, scale)


@noisy_scores.register_fake
def _(logits: Tensor, codes: Tensor, keys: Tensor, scale: Tensor) -> Tensor:  # noqa: ARG001 - the shape is the logits'
    return torch.empty_like(logits, dtype=torch.float32, memory_format=torch.contiguous_format)


@noisy_scores.register_kernel("cuda")
def _(logits: Tensor, codes: Tensor, keys: Tensor, scale: Tensor) -> Tensor:
    from amusd.sampling.noisy_scores_triton import launch_noisy_scores  # Triton comes with torch's CUDA builds

    with torch.cuda.device(logits.device):  # Triton launches on the current device
        return launch_noisy_scores(logits, codes, keys, scale)


def compose_noisy_scores(logits: Tensor, codes: Tensor, keys: Tensor, scale: Tensor) -> Tensor:
    """`noisy_scores` as a chain of torch's operators."""
    return torch.addcmul(logits.float(), gumbel(counters(codes, keys)), scale.unsqueeze(1))
