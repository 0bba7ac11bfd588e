"""Which part of a model each of several ranks computes, and how the parts become one result.

Query, key, value, gate and up are split by their outputs (whole key heads, with the query heads that share them),
output and down by their inputs, so that a layer needs two exchanges. The embedding is whole on every rank, the output
head is split by tokens. Shares may differ by one where a size does not divide.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amusd.models.linear import Linear
from amusd.models.passes import Pass


class Ranks:
    """The processes that compute one model together, as one of them sees them. This base class is a single process."""

    captures = True
    """True if exchanges can be part of a CUDA graph."""

    def __init__(self, rank: int, size: int) -> None:
        """`rank`: this one, in `[0, size)`."""
        self.rank = rank
        self.size = size

    def sum(self, part: Tensor) -> Tensor:
        """[rows, out] -> [rows, out] float32: the sum of every rank's `part`, the same bits on all.

        All parts have one shape and dtype, and all ranks make the same calls. Raises `PeerError` when another rank is
        gone; on a GPU of its own a rank may notice only in `check`.
        """
        return part.float()

    def join(self, part: Tensor) -> Tensor:
        """[rows, n] -> [rows, size * n]: every rank's columns, in the order of ranks. Otherwise like `sum`."""
        return part

    def check(self) -> None:
        """Raise `PeerError` if another rank is known to be gone: what the device has computed is void then."""

    def abort(self) -> None:
        """End exchanges that take too long on the device. No exchange works afterwards."""

    def announce(self, work: Pass) -> None:
        """Have the other ranks do the same, before the first one computes `work`."""


ALONE = Ranks(0, 1)
"""A model in one process."""


def share(count: int, ranks: Ranks) -> range:
    """This rank's part of `count` things."""
    return range(count * ranks.rank // ranks.size, count * (ranks.rank + 1) // ranks.size)


def share_of_outputs(weight: Tensor, ranks: Ranks) -> Tensor:
    """This rank's rows of `weight` [out, ...]: equally many on every rank, filled up with zeros."""
    rows = -(-len(weight) // ranks.size)
    part = weight[ranks.rank * rows : (ranks.rank + 1) * rows]
    missing = rows - len(part)
    return part if missing == 0 else torch.cat((part, part.new_zeros((missing, *weight.shape[1:]))))


class SummedLinear(Linear):
    """A `Linear` whose inputs are split among the ranks; one of them has the bias."""

    def __init__(self, part: Linear, ranks: Ranks) -> None:
        self._part = part
        self.nbytes = part.nbytes
        self._ranks = ranks

    def __call__(self, rows: Tensor) -> Tensor:
        """[rows, this rank's inputs] -> [rows, out]."""
        return self._ranks.sum(self._part(rows)).to(rows.dtype)

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """`residual` [rows, out] plus the product, as a new tensor; summed before rounding."""
        return (self._ranks.sum(self._part(rows)) + residual).to(residual.dtype)


class JoinedLinear(Linear):
    """A `Linear` whose outputs are split among the ranks; every rank receives all of them."""

    def __init__(self, part: Linear, num_outputs: int, ranks: Ranks) -> None:
        """`part`: made of `share_of_outputs`."""
        self._part = part
        self.nbytes = part.nbytes
        self._num_outputs = num_outputs
        self._ranks = ranks

    def __call__(self, rows: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        return self._ranks.join(self._part(rows))[:, : self._num_outputs]
