"""Counter-based noise: 32 bits for each (seed, absolute position, token id), and Gumbel noise made of them.

Nothing is drawn from a stream, so nothing has to be rewound, and two processes that know the seed agree on every number
without a message. Integer arithmetic is the same everywhere; only the two logarithms of the last step may differ
between machines, in the last bit of a float64.

    code(id)      a fixed hash of the token id, made once for a vocabulary
    key           64 bits out of (seed, position, domain)
    counter       three multiply-xorshift rounds over the code, keyed with both halves of the key
    v             (counter + 1/2) / 2^32, uniform in (0, 1)
    gumbel        -log(-log(1 - v)): large where v is small, where it has the full relative precision

References:
    The rounds are of the kind of C. Wellons' hash prospector, https://nullprogram.com/blog/2018/07/31/
    Keys are mixed as in SplitMix64 (Steele, Lea, Flood 2014, https://doi.org/10.1145/2714064.2660195).
"""

from __future__ import annotations

import enum
import functools
import math

import numpy as np
import numpy.typing as npt

Counters = npt.NDArray[np.uint32]

_MASK64 = (1 << 64) - 1
MASK32 = (1 << 32) - 1
_GOLDEN = 0x9E3779B97F4A7C15
FIRST_FACTOR, _SECOND, _THIRD = 0x7FEB352D, 0x846CA68B, 0x9E485565
"""The factor of the first round of `counters`, which needs no fold."""
ROUNDS = ((16, _SECOND), (15, _THIRD))
"""Shift and factor of its other rounds."""
LAST_SHIFT = 16
"""The shift of the fold at the end of `counters`."""
_CODE_ROUNDS, _LAST_CODE_SHIFT = ((17, _SECOND), (15, _THIRD), (16, FIRST_FACTOR)), 15
_HALF = 0.5
UNIT = 2.0**-32
_TO_MINUS_UNIT = -UNIT * (1 - 2.0**-23)
"""Takes counters to (-1, 0), and the largest float32 of them not to -1, whose logarithm is infinite."""


class Domain(enum.IntEnum):
    """The use of noise: streams of different domains are independent of each other."""

    MATCHING = 0
    """Shared by draft and target, which must never be done under another rule."""
    DRAFT = 1
    """The draft's own draws."""
    ACCEPT = 2
    """Whether a candidate is accepted."""
    RESAMPLE = 3
    """The token in the place of a rejected candidate, or behind all of them."""


def key_of(seed: int, position: int, domain: Domain) -> int:
    """64 bits that name one position of one request."""
    key = _mix64(seed & _MASK64)
    key = _mix64(key ^ (position & _MASK64))
    return _mix64(key ^ domain)


@functools.lru_cache(maxsize=8)
def codes_of(num_ids: int) -> Counters:
    """[num_ids]: a fixed hash of each token id. Read-only."""
    codes = np.arange(1, num_ids + 1, dtype=np.uint32)
    scratch = np.empty_like(codes)
    for shift, factor in _CODE_ROUNDS:
        _round(codes, scratch, shift, factor)
    _fold(codes, scratch, _LAST_CODE_SHIFT)
    codes.flags.writeable = False
    return codes


def codes_of_columns(num_columns: int, ids: npt.NDArray[np.int64] | None) -> Counters:
    """[num_columns]: the code of the token that each column scores, `ids` [num_columns]; None: its own number."""
    return codes_of(num_columns) if ids is None else codes_of(int(ids.max()) + 1)[ids]


def counters(key: int, codes: Counters, out: Counters | None = None, scratch: Counters | None = None) -> Counters:
    """[ids]: the 32 bits of each code under `key`. `out` and `scratch`, of the same shape, save two allocations."""
    low, high = halves_of(key)
    result: Counters = np.bitwise_xor(codes, np.uint32(low), out=out)
    scratch = np.empty_like(result) if scratch is None else scratch
    np.multiply(result, np.uint32(FIRST_FACTOR), out=result)  # the codes are folded already
    np.add(result, np.uint32(high), out=result)
    for shift, factor in ROUNDS:
        _round(result, scratch, shift, factor)
    _fold(result, scratch, LAST_SHIFT)
    return result


def halves_of(key: int) -> tuple[int, int]:
    """The low and the high 32 bits."""
    return key & MASK32, key >> 32


def uniform(key: int) -> float:
    """One number in (0, 1) for a key of its own, with 53 bits."""
    return ((_mix64(key) >> 11) + _HALF) * 2.0**-53


def gumbel(of: Counters) -> npt.NDArray[np.float64]:
    """float64 of the counters' shape: standard Gumbel noise."""
    noise: npt.NDArray[np.float64] = -np.log(-np.log1p(-((of + _HALF) * UNIT)))
    return noise


def float_gumbel(of: Counters) -> npt.NDArray[np.float32]:
    """float32 of the counters' shape: the noise of `gumbel`, to rounding."""
    noise = of.astype(np.float32)
    np.add(noise, np.float32(_HALF), out=noise)
    np.multiply(noise, np.float32(_TO_MINUS_UNIT), out=noise)  # -v
    np.log1p(noise, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)


def code_of(token_id: int) -> int:
    """The code of one token: `codes_of(...)[token_id]`."""
    code = token_id + 1
    for shift, factor in _CODE_ROUNDS:
        code = (code ^ code >> shift) * factor & MASK32
    return code ^ code >> _LAST_CODE_SHIFT


def gumbel_of(token_id: int, key: int) -> float:
    """The noise of one token: `gumbel(counters(key, codes_of(...)))[token_id]`."""
    low, high = halves_of(key)
    counter = ((code_of(token_id) ^ low) * FIRST_FACTOR + high) & MASK32
    for shift, factor in ROUNDS:
        counter = (counter ^ counter >> shift) * factor & MASK32
    return -math.log(-math.log1p(-((counter ^ counter >> LAST_SHIFT) + _HALF) * UNIT))


def _fold(numbers: Counters, scratch: Counters, shift: int) -> None:
    """Let the high bits reach the low ones; in place."""
    np.right_shift(numbers, np.uint32(shift), out=scratch)
    np.bitwise_xor(numbers, scratch, out=numbers)


def _round(numbers: Counters, scratch: Counters, shift: int, factor: int) -> None:
    """Fold, then let the low bits reach the high ones; in place."""
    _fold(numbers, scratch, shift)
    np.multiply(numbers, np.uint32(factor), out=numbers)


def _mix64(value: int) -> int:
    value = (value + _GOLDEN) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
