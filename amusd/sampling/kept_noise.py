"""The Gumbel noise of `noise.py` in float32, kept for the positions that a tree stands at, where its logits are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from amusd.sampling.noise import (
    FIRST_FACTOR,
    LAST_SHIFT,
    MASK32,
    ROUNDS,
    UNIT,
    Counters,
    Domain,
    counters,
    halves_of,
    key_of,
)

_POSITIONS_KEPT = 16
"""The nodes of a tree stand at few positions, and meet each of them often."""
_TO_MINUS_UNIT = -UNIT * (1 - 2.0**-23)
"""Takes counters to (-1, 0), and the largest float32 of them not to -1, whose logarithm is infinite."""


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

    def at(self, positions: Sequence[int]) -> list[Tensor]:
        """[columns] float32 for each. Do not write to it."""
        found = {position: noise for position in positions if (noise := self._kept.get(position)) is not None}
        if missing := [position for position in dict.fromkeys(positions) if position not in found]:
            found.update(zip(missing, self._made(missing), strict=True))
            self._kept.update((position, found[position]) for position in missing)
            for position in list(self._kept)[:-_POSITIONS_KEPT]:
                del self._kept[position]
        return [found[position] for position in positions]

    def _made(self, positions: Sequence[int]) -> Sequence[Tensor]:
        keys = [key_of(self._seed, position, Domain.MATCHING) for position in positions]
        if self._device_codes is not None:
            return device_gumbel(self._device_codes, keys).mul_(self._scale).unbind()
        noises = (float_gumbel(counters(key, self._codes, *self._scratch)) for key in keys)
        return [torch.from_numpy(noise).mul_(self._scale) for noise in noises]


def float_gumbel(of: Counters) -> npt.NDArray[np.float32]:
    """float32 of the counters' shape: the noise of `noise.gumbel`, to rounding."""
    noise = of.astype(np.float32)
    np.add(noise, np.float32(0.5), out=noise)
    np.multiply(noise, np.float32(_TO_MINUS_UNIT), out=noise)  # -v of `noise.py`
    np.log1p(noise, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)


def device_gumbel(codes: Tensor, keys: Sequence[int]) -> Tensor:
    """[keys, codes] float32: `noise.gumbel` of `codes` (int64) under each key, to rounding, on their device."""
    numbers = device_counters(codes, keys)
    low = numbers.float().add_(0.5).mul_(-UNIT).log1p_()
    high = numbers.neg().add_(MASK32).float().add_(0.5).mul_(UNIT).log_()  # v near 1: 1 - v has the precision
    return torch.where(numbers <= MASK32 >> 1, low, high).neg_().log_().neg_()


def device_counters(codes: Tensor, keys: Sequence[int]) -> Tensor:
    """[keys, codes] int64: `noise.counters`, bit for bit."""
    halves = torch.tensor([halves_of(key) for key in keys], dtype=torch.int64).to(codes.device).unsqueeze(2)
    numbers = codes.bitwise_xor(halves[:, 0]).mul_(FIRST_FACTOR).add_(halves[:, 1]).bitwise_and_(MASK32)
    for shift, factor in ROUNDS:
        numbers.bitwise_xor_(numbers >> shift).mul_(factor).bitwise_and_(MASK32)  # wraps: the low half stays right
    return numbers.bitwise_xor_(numbers >> LAST_SHIFT)
