"""How a model is split among ranks, and how their parts become one result.

Query, key, value, gate and up are split by outputs (whole key heads with their query heads), output and down by inputs:
two exchanges per layer. Every rank has the whole embedding; the head is split by tokens. Shares may differ by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amusd.models.passes import RankCommand
from amusd.sampling.sampler import Level


class Ranks:
    """The ranks that compute one model, seen from one of them. The base class is a single rank."""

    captures = True
    """Whether exchanges can be part of a CUDA graph."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def own_rows(self, _num_rows: int) -> slice:
        """The rows of a pass that this rank sums: all, or its share of many."""
        return slice(None)

    def parts(self, part: Tensor) -> Tensor:
        """[rows, n] -> [size, own rows, n]: every rank's part of this rank's rows, in rank order.

        All ranks make the same calls with one shape and dtype. Raises `PeerError` when another rank is gone; on a GPU
        perhaps only in `check`.
        """
        return part.unsqueeze(0)

    def whole(self, own: Tensor, _num_rows: int) -> Tensor:
        """[own rows, n] -> [num_rows, n]: every rank's rows, perhaps `own` itself. Otherwise like `parts`."""
        return own

    def join(self, part: Tensor) -> Tensor:
        """[rows, n] -> [rows, size * n]: every rank's columns in rank order. Otherwise like `parts`."""
        return part

    def check(self) -> None:
        """Raise `PeerError` if another rank is known to be gone: device results are void then."""

    def abort(self) -> None:
        """End the exchanges of a failed pass. No exchange works afterwards."""

    def announce(self, work: RankCommand, level: Level | None) -> None:
        """Send `work` and the level of its sampler to the other ranks."""


ALONE = Ranks(0, 1)


def share(count: int, ranks: Ranks) -> range:
    """This rank's part of `count` items."""
    return range(count * ranks.rank // ranks.size, count * (ranks.rank + 1) // ranks.size)


def share_of_outputs(weight: Tensor, ranks: Ranks) -> Tensor:
    """This rank's rows of `weight` [out, ...], padded with zeros to the same number on every rank."""
    rows = -(-len(weight) // ranks.size)
    part = weight[ranks.rank * rows : (ranks.rank + 1) * rows]
    missing = rows - len(part)
    return part if missing == 0 else torch.cat((part, part.new_zeros((missing, *weight.shape[1:]))))
