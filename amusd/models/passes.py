"""One forward pass: its sequences' rows, what is sampled, and what comes out.

A *slot* is the place of a token's keys and values in a cache. A *position* is the token's distance from the start of
its path; keys are rotated by it. Nodes of different branches may share a position, never a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor

from amusd.errors import NotFiniteError
from amusd.models.kv_cache import KVCache
from amusd.models.numerics import Numerics
from amusd.protocol.verification import place_rows
from amusd.sampling.sampler import RowSampler
from amusd.sampling.sampler_inputs import PackedInputs


@dataclass(frozen=True, slots=True)
class SamplerRows:
    """A sampler, and its inputs for one sequence's rows."""

    sampler: RowSampler
    inputs: PackedInputs
    """[rows, inputs], then a row for each further step."""


@dataclass(frozen=True, slots=True)
class Paths:
    """Slots of the path of each row over one cache: a shared prefix, then the row's branch."""

    prefix: npt.NDArray[np.int64]
    """[length], in order."""
    branches: Sequence[Sequence[int]]
    """The last slot of a branch is the row's own; others may be of earlier passes."""

    @property
    def positions(self) -> list[int]:
        """The position of each row."""
        before = len(self.prefix) - 1
        return [before + len(branch) for branch in self.branches]

    @property
    def slots(self) -> list[int]:
        """The slot of each row."""
        return [branch[-1] for branch in self.branches]

    @property
    def parents(self) -> list[int]:
        """Slot of the token before each row; 0 without one."""
        before = int(self.prefix[-1]) if len(self.prefix) else 0
        return [branch[-2] if len(branch) > 1 else before for branch in self.branches]

    @property
    def num_keys(self) -> int:
        """Number of slots up to the last that is read."""
        return max(int(self.prefix.max(initial=-1)), *(max(branch) for branch in self.branches)) + 1

    def seen(self, num_keys: int, num_rows: int) -> npt.NDArray[np.int64]:
        """[num_rows, num_keys]: position of each slot that a row sees, the row's own included; -1: not seen.

        Padded rows see the first row's slots.
        """
        before = len(self.prefix)
        seen = np.full((num_rows, num_keys), -1)
        seen[:, self.prefix] = np.arange(before)
        padding = [self.branches[0]] * (num_rows - len(self.branches))
        for row, branch in zip(seen, [*self.branches, *padding], strict=True):
            row[list(branch)] = np.arange(before, before + len(branch))
        return seen


@dataclass(frozen=True, slots=True)
class Rows:
    """One sequence's rows in a pass: a chain, several paths that share their first token, or nodes of a tree."""

    token_ids: Sequence[int]
    cache: KVCache
    """The caches of a pass differ, and share one memory."""
    wanted: SamplerRows | None = None
    """None: the most likely tokens."""
    parents: Sequence[int] | None = None
    """[rows - 1] for paths: the row before each but the first."""
    num_again: int = 0
    """Number of leading rows that are computed again for tokens that the cache held; the output lacks their logits."""
    num_final: int = 1
    """Number of leading rows that no rollback drops. Negative: `-num_final` earlier tokens may be dropped, too."""
    paths: Paths | None = None
    """Slots of a tree (the caller's) or of `parents` (the model's). None: a chain."""


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Get ready for passes with one sampler over the memory of a cache."""

    cache: KVCache
    steps: int
    """Most steps of a pass."""
    dtype: str
    """Rank 0's dtype, which all ranks must have."""


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Take in a chunk of a prompt."""

    cache: KVCache
    token_ids: Sequence[int]


class Forward(msgspec.Struct, frozen=True, tag=True):
    """Compute a pass."""

    rows: Sequence[Rows]
    steps: int
    """Tokens that each sequence chooses one after another: several only in captured passes."""

    @property
    def cache(self) -> KVCache:
        """One of the caches."""
        return self.rows[0].cache


class Keep(msgspec.Struct, frozen=True, tag=True):
    """Continue the sequence with these rows of the last pass."""

    cache: KVCache
    rows: Sequence[int]


class Wipe(msgspec.Struct, frozen=True, tag=True):
    """Write zeros beyond the sequence."""

    cache: KVCache


RankCommand: TypeAlias = Prepare | Prefill | Forward | Keep | Wipe
"""A command that all ranks of a model run at once."""


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """The result of a pass for one sequence."""

    logits: Tensor
    """[rows, vocab]: row i scores the token after input i.

    Captured passes leave logits on the device, valid until the next pass.
    """
    wanted: SamplerRows | None = None
    """None: the most likely tokens."""
    columns: npt.NDArray[np.int64] | None = None
    """[rows], then one per further step: chosen by a captured pass; None: not chosen yet."""
    largest: npt.NDArray[np.float64] | None = None
    """[rows]: the logits of `columns`."""
    outputs: npt.NDArray[np.int32] | None = None
    """[rows, num_outputs]: other outputs of the sampler."""

    def choose(self) -> list[int]:
        """The column of each row and step, as `sample`."""
        return [self.sample(row)[0] for row in range(len(self.logits if self.columns is None else self.columns))]

    def sample(self, row: int) -> tuple[int, npt.NDArray[np.int32]]:
        """The column sampled for one row, and the sampler's other outputs.

        Raises `NotFiniteError` where the largest logit is NaN or infinite.
        """
        nothing = np.empty(0, dtype=np.int32)
        if self.columns is not None and self.largest is not None:
            check_finite(self.largest[row])
            return int(self.columns[row]), nothing if self.outputs is None else self.outputs[row]
        logits = self.logits[row].float().numpy()
        if self.wanted is None:
            column = int(logits.argmax())  # a NaN counts as the largest
            check_finite(logits[column])
            return column, nothing
        check_finite(logits.max())
        return self.wanted.sampler.compute_row(logits, self.wanted.inputs[row])

    def check(self) -> None:
        """Raise `NotFiniteError` unless each row's largest logit is finite."""
        check_finite(self.logits.float().numpy().max(1) if self.largest is None else self.largest)


def check_finite(largest: npt.ArrayLike) -> None:
    """Raise `NotFiniteError` unless these largest logits are finite."""
    finite = np.isfinite(largest)
    if not finite.all():
        raise NotFiniteError(f"the largest logit is {np.extract(~finite, largest)[0]}")


def lay_out(parents: Sequence[int], cache: KVCache, numerics: Numerics) -> Paths:
    """Slots of paths that share their first row, after a cache's tokens. `parents`: see `Rows`.

    A row's slot is its position plus a stride for each lower track. Captured passes take the next free slots, since
    their sums do not depend on slots. Raises `ValueError` for too few tracks, or a row before its parent.
    """
    start = cache.length
    rows = place_rows(parents, numerics.tracks_at(start))
    slots = cache.slots[start : start + len(rows)].tolist()
    if cache.captured is None:
        slots = [start + depth + track * numerics.track_stride for depth, track in rows]
    branches = [slots[:1]]
    for row, parent in enumerate(parents, start=1):
        branches.append([*branches[parent], slots[row]])
    return Paths(cache.slots[:start], branches)
