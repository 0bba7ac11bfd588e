"""Noise without a generator, and draws: a token's noise depends on seed, position, domain and token id alone.

So a rollback rewinds nothing, and processes with the same seed agree. Integers are equal on all devices; the two
logarithms may differ in their last bits.

    code          32 bits from the token id
    key           64 bits from seed, position and domain
    counter       32 bits from code and key, by three multiply-xorshift rounds
    v             (counter + 1/2) / 2^32, uniform in (0, 1)
    noise         -log(-log(1 - v)), standard Gumbel; its largest values come from the smallest v, the most precise ones
    score         logit + scale * noise; the argmax is a draw from softmax(logits / scale)

A draft that adds the same noise to its own logits guesses right with a probability of at least (1 - TV) / (1 + TV); TV
is the total variation distance of the two distributions.

References:
    Rounds are like those of C. Wellons' hash prospector, https://nullprogram.com/blog/2018/07/31/
    Keys are mixed as in SplitMix64 (Steele, Lea, Flood 2014, https://doi.org/10.1145/2714064.2660195).
    Daliri, Musco, Suresh 2024, Coupling without communication, https://arxiv.org/abs/2408.07978
"""

from __future__ import annotations

import enum
import math
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from amusd.sampling.operators import register_triton
from amusd.sampling.processors import Columns, Row, likely_columns

Bits = npt.NDArray[np.uint32]
_Ints = TypeVar("_Ints", int, Tensor, npt.NDArray[np.int64])

_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1
_GOLDEN = 0x9E3779B97F4A7C15
FIRST_FACTOR, _SECOND, _THIRD = 0x7FEB352D, 0x846CA68B, 0x9E485565
"""Factors of the rounds of `counters`. The first round needs no shift, as `code_of` ends with one."""
ROUNDS = ((16, _SECOND), (15, _THIRD))
LAST_SHIFT = 16
_CODE_ROUNDS, _LAST_CODE_SHIFT = ((17, _SECOND), (15, _THIRD), (16, FIRST_FACTOR)), 15
UNIT = 2.0**-32
_FEW = 128
"""Number of columns that `choose` tries first."""
_SLACK = 1e-6
"""Relative slack of the bound on counters, for rounding."""


class Domain(enum.IntEnum):
    """A use of noise; uses are independent."""

    MATCHING = 0
    """The choices of draft and target where a candidate must equal the target's choice."""
    DRAFT = 1
    """Ratio test: the draft's draws."""
    ACCEPT = 2
    """Ratio test: whether a candidate is kept."""
    RESAMPLE = 3
    """Ratio test: the token in place of a rejected candidate, or after all candidates."""


def key_of(seed: int, position: int, domain: Domain) -> int:
    """The 64-bit key of one position of one request."""
    return _mix64(_mix64(_mix64(seed) ^ position) ^ domain)


def uniform(key: int) -> float:
    """A number in (0, 1) with 53 bits."""
    return ((_mix64(key) >> 11) + 0.5) * 2.0**-53


def _mix64(value: int) -> int:
    value = (value + _GOLDEN) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def code_of(token_id: _Ints) -> _Ints:
    """The 32-bit code of a token id, or of each of int64 ids."""
    code = token_id + 1
    for shift, factor in _CODE_ROUNDS:
        code = (code ^ code >> shift) * factor & _MASK32
    return code ^ code >> _LAST_CODE_SHIFT


def codes_of(num_ids: int) -> Tensor:
    """int32 [num_ids]: the code of each token id."""
    codes = code_of(torch.arange(num_ids))
    return (codes - (codes >> 31 << 32)).int()


def counters(codes: Bits, key: int) -> Bits:
    """[columns]: 32 bits for each code under a 64-bit key, which may be negative."""
    numbers: Bits = codes ^ np.uint32(key & _MASK32)
    scratch = np.empty_like(numbers)
    numbers *= np.uint32(FIRST_FACTOR)
    numbers += np.uint32(key >> 32 & _MASK32)
    for shift, factor in ROUNDS:
        numbers ^= np.right_shift(numbers, np.uint32(shift), out=scratch)
        numbers *= np.uint32(factor)
    numbers ^= np.right_shift(numbers, np.uint32(LAST_SHIFT), out=scratch)
    return numbers


def gumbel(numbers: Bits) -> npt.NDArray[np.float64]:
    """[columns]: the noise of counters."""
    below = torch.from_numpy((numbers + 0.5) * -UNIT)  # torch's logarithms take half of numpy's time
    noise: npt.NDArray[np.float64] = below.log1p_().neg_().log_().neg_().numpy()
    return noise


def noise_of(codes: Bits, key: int) -> npt.NDArray[np.float64]:
    """[columns]: the noise of tokens with these codes under a key."""
    return gumbel(counters(codes, key))


def noise_of_rows(codes: Tensor, keys: Tensor) -> Tensor:
    """[rows, columns] float64: the noise of `codes` [columns] for each of `keys` [rows], on any device."""
    keys = keys.unsqueeze(1)
    numbers = ((codes ^ keys) & _MASK32) * FIRST_FACTOR + (keys >> 32 & _MASK32) & _MASK32
    for shift, factor in ROUNDS:
        numbers = (numbers ^ numbers >> shift) * factor & _MASK32
    numbers = numbers ^ numbers >> LAST_SHIFT
    return -torch.log(-torch.log1p((numbers.double() + 0.5) * -UNIT))


def noisy_argmax(logits: Tensor, codes: Tensor, keys: Tensor, scale: Tensor) -> Tensor:
    """int64 [rows]: the column with the largest score, the first of equal ones; a NaN comes before all others."""
    if logits.device.type != "cpu":
        scores: Tensor = noisy_scores(logits, codes, keys, scale)
        return scores.max(1).indices  # the first of equal ones, as documented
    each = zip(logits.numpy(), keys.tolist(), scale.tolist(), strict=True)
    return torch.tensor([choose(row, codes.numpy().view(np.uint32), key, factor) for row, key, factor in each])


def choose(logits: Row, codes: Bits, key: int, scale: float, left: Columns | None = None) -> int:
    """The column of one row with the largest score, on a CPU; the largest logit must be finite.

    `left`: the columns to choose from; None: all. The likeliest columns get noise first. Few other columns have a
    counter small enough to win.
    """
    if scale == 0:
        return int(logits.argmax())
    columns = likely_columns(logits, _FEW) if left is None else left
    scores = logits[columns] + scale * noise_of(codes[columns], key)
    found = int(columns[scores.argmax()])
    if left is not None or len(columns) == len(logits):
        return found
    noise_of_others = (scores.max() - logits[columns].min()) / scale
    numbers = counters(codes, key)
    largest = -math.expm1(-math.exp(-noise_of_others)) / UNIT * (1 + _SLACK)
    rivals = np.append(np.flatnonzero(numbers <= np.uint32(min(largest, 2**32 - 1))), found)
    return int(rivals[(logits[rivals] + scale * gumbel(numbers[rivals])).argmax()])


@register_triton("amusd.sampling.noise_triton")
def noisy_scores(logits: Tensor, codes: Tensor, keys: Tensor, scale: Tensor) -> Tensor:
    """float32 [rows, columns]: `logits` [rows, columns] plus `scale` [rows] float32 times the noise.

    `codes` [columns] int32: `codes_of` of the columns' tokens; `keys` [rows] int64. One Triton kernel on a GPU.
    """
    return torch.addcmul(logits.double(), noise_of_rows(codes, keys), scale.double().unsqueeze(1)).float()
