"""The Gumbel noise of `noise.py` in float32, kept for the positions that a tree stands at, where its logits are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from amusd.sampling.noise import FIRST_FACTOR, LAST_SHIFT, ROUNDS, Counters, Domain, counters, halves_of, key_of

_POSITIONS_KEPT = 16
"""The nodes of a tree stand at few positions, and meet each of them often."""
_TO_MINUS_UNIT = -(2.0**-32) * (1 - 2.0**-23)
"""Takes counters to (-1, 0), and the largest float32 of them not to -1, whose logarithm is infinite."""
_MASK32 = (1 << 32) - 1


class KeptNoise:
    """Of one request: shared by draft and target, as under matching."""

    def __init__(self, seed: int, codes: Counters, device: torch.device, scale: float = 1.0) -> None:
        """`codes` [columns]: of the tokens that the columns score; `scale`: what the noise is multiplied by."""
        self._seed = seed
        self._scale = scale
        self._codes = codes
        self._scratch = np.empty((2, len(codes)), dtype=np.uint32)
        self._device_codes = None if device.type == "cpu" else torch.from_numpy(codes.astype(np.int64)).to(device)
        self._kept: dict[int, Tensor] = {}

    def at(self, position: int) -> Tensor:
        """[columns] float32. Do not write to it."""
        noise = self._kept.get(position)
        if noise is None:
            if len(self._kept) == _POSITIONS_KEPT:
                del self._kept[next(iter(self._kept))]
            key = key_of(self._seed, position, Domain.MATCHING)
            if self._device_codes is None:
                noise = torch.from_numpy(float_gumbel(counters(key, self._codes, *self._scratch)))
            else:
                noise = device_gumbel(self._device_codes, key)
            self._kept[position] = noise.mul_(self._scale)
        return noise


def float_gumbel(of: Counters) -> npt.NDArray[np.float32]:
    """float32 of the counters' shape: the noise of `noise.gumbel`, to rounding."""
    noise = of.astype(np.float32)
    np.add(noise, np.float32(0.5), out=noise)
    np.multiply(noise, np.float32(_TO_MINUS_UNIT), out=noise)  # -v of `noise.py`
    np.log1p(noise, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)


def device_gumbel(codes: Tensor, key: int) -> Tensor:
    """float32 of the shape of `codes` (int64): the same under `key`, computed on their device."""
    unit = device_counters(codes, key).float().add_(0.5).mul_(_TO_MINUS_UNIT)
    return unit.log1p_().neg_().log_().neg_()


def device_counters(codes: Tensor, key: int) -> Tensor:
    """int64: `noise.counters`, bit for bit."""
    low, high = halves_of(key)
    numbers = codes.bitwise_xor(low).mul_(FIRST_FACTOR).add_(high).bitwise_and_(_MASK32)
    for shift, factor in ROUNDS:
        numbers.bitwise_xor_(numbers >> shift).mul_(factor).bitwise_and_(_MASK32)  # wraps: the low half stays right
    return numbers.bitwise_xor_(numbers >> LAST_SHIFT)
