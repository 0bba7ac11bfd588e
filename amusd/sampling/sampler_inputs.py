"""The inputs of a sampler, packed: one array of 64-bit numbers for all rows, sent to a GPU in one copy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PackedInputs = npt.NDArray[np.int64]
"""[rows, inputs]."""
MAX_MIXED = 3
"""Most columns in the `Mixture` of a row."""
_MIXED = 10
NUM_BEFORE_PATH = _MIXED + MAX_MIXED


class SamplerInputs(NamedTuple):
    """Views of packed inputs by name, of all rows or of one row (then without the first dimension).

    Integers are int64; numbers are float64, and read as float32 from tensors. Each input has a neutral value, so that
    rows of requests with different settings share a pass.
    """

    key: Any
    """[rows]: key of the noise, unsigned."""
    temperature: Any
    """[rows] number; 0: no noise."""
    last: Any
    """[rows]: top_k - 1, or the last column."""
    top_p: Any
    """[rows] number; above 1: no filter."""
    margin: Any
    """[rows] number, at most 0: the least kept logit minus the largest; minus infinity: no filter."""
    sharpness: Any
    """[rows] number: 1 / temperature."""
    penalties: Any
    """[rows, 3] numbers: repetition, presence and frequency penalty."""
    sequence: Any
    """[rows]: 1 + the sequence's number in its `SamplingState`; 0: neither bias nor counts."""
    mixed: Any
    """[rows, MAX_MIXED]: columns of a `Mixture`, whose scores a `RowRanker` returns; -1: none."""
    path: Any
    """[rows, n]: 1 + the column of each token of the row's path; padded with 0."""

    @classmethod
    def of(cls, packed: PackedInputs | Tensor) -> SamplerInputs:
        """Name the parts of packed inputs; parts of an array may be written."""
        ints: Any = packed
        numbers = ints.view(torch.float64).float() if isinstance(packed, Tensor) else ints.view(np.float64)
        return cls(
            *(ints[..., 0], numbers[..., 1], ints[..., 2], numbers[..., 3], numbers[..., 4], numbers[..., 5]),
            *(numbers[..., 6:9], ints[..., 9], ints[..., _MIXED:NUM_BEFORE_PATH], ints[..., NUM_BEFORE_PATH:]),
        )
