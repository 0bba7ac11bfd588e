"""Shared-noise matching (`matching.py`) of logits on a device: of each row the host sees the few columns that can win.

The device scores all columns in float32. The host takes the best of the best by their exact scores, as if it had the
whole row, and asks for that where a column left behind might win: practically never.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from amusd.sampling.kept_noise import KeptNoise
from amusd.sampling.noise import Counters, Domain, counters, gumbel, key_of

NUM_CONTENDERS = 8
"""Columns of a row that come to the host."""
_SLACK, _SLACK_PER_UNIT = 1e-3, 1e-5
"""How far a float32 score may be off at most, with much to spare: in all, and for each unit of its size."""


class Contenders:
    """Of one request, whose logits nothing but a temperature above 0 shapes."""

    def __init__(self, seed: int, temperature: float, codes: Counters, device: torch.device) -> None:
        """`codes` [columns]: of the tokens that the columns score."""
        self._seed = seed
        self._temperature = temperature
        self._codes = codes
        self._noise = KeptNoise(seed, codes, device, temperature)

    def chooser(self, logits: Tensor, positions: Sequence[int]) -> Callable[[int], int | None]:
        """For rows [rows, columns]: the column of row `i`, whose token stands at `positions[i]`; None: not clear."""
        with torch.inference_mode():
            exact = logits.float()
            scores = exact + torch.stack(self._noise.at(positions))
            best, columns = scores.topk(min(NUM_CONTENDERS, scores.shape[1]), dim=1)
            parts = (best, columns, exact.gather(1, columns))
            found = torch.stack([part.double() for part in parts], dim=1).cpu().numpy()  # [rows, 3, contenders]
        return lambda row: self._best(found[row], positions[row])

    def _best(self, found: npt.NDArray[np.float64], position: int) -> int | None:
        """`found` [3, contenders]: scores, columns and logits."""
        scores, columns, logits = found
        order = np.argsort(columns)  # of equal ones the first column
        own = columns[order].astype(np.intp)
        rows = logits[order].astype(np.float32)
        if self._temperature != 1:
            rows = rows / np.float32(self._temperature)  # what `LogitsProcessor` computes
        key = key_of(self._seed, position, Domain.MATCHING)
        exact = rows.astype(np.float64) + gumbel(counters(key, self._codes[own]))
        winner = int(exact.argmax())
        if len(own) < len(self._codes):
            score = float(exact[winner]) * self._temperature
            least = float(scores.min())
            if not score > least + _SLACK + _SLACK_PER_UNIT * (abs(score) + abs(least)):
                return None
        return int(own[winner])
