"""The rule that decides how many rows and keys a forward pass computes with. Standard library only.

A row's result depends, in its last bits, on how many rows share its matrix products and on how many keys attention sums
over. `fixed` makes both a function of the row's position alone, so that neither the length of a block nor where it was
cut (which timing decides) can reach the numbers.

A pass may hold several paths that share its first token (`lay_out_paths` in `tree_pass.py`). Rows of one position then
need slots of their own: the position's, or that plus a multiple of `TRACK_STRIDE`. Attention's sums run through vector
lanes, and keys in the order of slots. So keys that are moved by a multiple of the lanes, in their order, past others
that are masked, change no bit: the masked ones add zeros. Kernels take keys in blocks and begin a sum anew at each (of
384 and of 512, where this was found out), so none moves beyond the border.

Mixtures of experts stay outside this promise: how many rows share an expert's product depends on the other rows.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

TRACK_STRIDE = 16
"""A multiple of every number of float32 lanes that CPUs have (4, 8, 16)."""
NUM_TRACKS = 3
"""Rows of one position that a pass may hold: a third alternative is hardly ever right."""


@dataclass(frozen=True)
class Numerics:
    """How blocks are cut and padded. Every method is a pure function of positions and row counts."""

    width: int
    """Most rows of one verification pass; with `fixed`, the number of rows of every such pass (dummy rows added)."""
    fixed: bool
    """True: bit-exact whatever the blocks. False: as little padding as the device likes."""
    border: int = 128
    """With `fixed`: attention reads keys up to the next border, and no block crosses one. A border is a multiple of
    this; with `doubling`, this times a power of two."""
    prefill_chunk: int = 256
    """Prompt tokens per pass; chunks end at its multiples. A multiple of `border`."""
    doubling: bool = False
    """For devices that replay captured passes: few different numbers of keys, with and without `fixed`."""
    max_keys: int | None = None
    """With `doubling`: the last border, where memory ends."""
    num_tracks: int = 1
    """Rows of one position that a pass may hold, in tracks of slots that lie `track_stride` apart. With `fixed` they
    need keys that do not double, so that no row moves past a border; else they have keys that do."""

    @classmethod
    def for_device(cls, device: str, *, width: int, fixed: bool) -> Numerics:
        """The rule for a kind of device (`cpu`, `cuda:0` ...)."""
        if device == "cpu":
            # With `bucketed` each row costs time there: none is free for another path.
            return cls(width=width, fixed=fixed, num_tracks=NUM_TRACKS if fixed else 1)
        # How attention on a GPU groups its sums is the kernel's affair: with `fixed` no row may stand elsewhere.
        tracks = 1 if fixed else NUM_TRACKS
        return cls(width=width, fixed=fixed, border=256, prefill_chunk=1024, doubling=True, num_tracks=tracks)

    def __post_init__(self) -> None:
        if min(self.width, self.border, self.prefill_chunk, self.num_tracks) < 1:
            raise ValueError(f"width, border, prefill_chunk and num_tracks must be at least 1: {self}")
        if self.num_tracks > 1 and self.doubling == self.fixed:
            raise ValueError(f"num_tracks={self.num_tracks} needs either a fixed width or numbers of keys that double")
        if self.prefill_chunk % self.border:
            raise ValueError(f"prefill_chunk={self.prefill_chunk} must be a multiple of border={self.border}")

    def max_rows(self, start: int) -> int:
        """How many tokens one pass may carry when the first stands at position `start`."""
        return min(self.width, self.border_after(start) - start) if self.fixed else self.width

    def padded_rows(self, rows: int) -> int:
        """Rows to compute for `rows` tokens: `width`, or the next power of two (at most `width`)."""
        return self.width if self.fixed else min(self.width, 1 << (rows - 1).bit_length())

    @property
    def row_counts(self) -> list[int]:
        """Every number of rows that is computed."""
        return sorted({self.padded_rows(rows) for rows in range(1, self.width + 1)})

    def num_keys(self, start: int, rows: int) -> int:
        """Keys that attention reads in a pass over the computed rows `[start, start + rows)` of a block."""
        if self.fixed:
            return self.border_after(start)
        return self.border_after(start + rows - 1) if self.doubling else start + rows

    def path_keys(self, start: int, rows: int) -> int:
        """The same for a pass over several paths, in as many tracks as there are at `start`."""
        return self.num_keys(start, rows if self.fixed else rows + (self.tracks_at(start) - 1) * self.track_stride)

    def node_keys(self, num_keys: int, allocated: int) -> int:
        """Keys that a captured pass reads which needs the first `num_keys` of `allocated` slots: few different ones."""
        return min(allocated, self.border << ((num_keys - 1) // self.border).bit_length())

    def node_borders(self, allocated: int) -> list[int]:
        """Every outcome of `node_keys`."""
        borders = [self.node_keys(1, allocated)]
        while borders[-1] < allocated:
            borders.append(self.node_keys(borders[-1] + 1, allocated))
        return borders

    @property
    def track_stride(self) -> int:
        """Slots from a row's to the one beside it: more than a path has rows."""
        return self._round_up(self.width, TRACK_STRIDE)

    def tracks_at(self, start: int) -> int:
        """How many tracks a pass has whose first row stands at `start` (at least 1)."""
        if not self.fixed or self.num_tracks == 1:
            return self.num_tracks
        num_free = self.border_after(start) - start - self.max_rows(start)
        return min(self.num_tracks, 1 + num_free // self.track_stride)

    def border_after(self, position: int) -> int:
        """The first border beyond `position`."""
        if not self.doubling:
            return (position // self.border + 1) * self.border
        border = self.border << (position // self.border).bit_length()
        return border if self.max_keys is None else min(border, self.max_keys)

    def borders(self, capacity: int) -> list[int]:
        """Every number of keys that a pass in a cache of `capacity` tokens may read, with `fixed` or `doubling`."""
        borders = [self.border_after(0)]
        while borders[-1] < capacity:
            borders.append(self.border_after(borders[-1]))
        return borders

    def prefill_end(self, start: int, length: int) -> int:
        """Where the prompt chunk that begins at `start` ends, in a prompt that ends at `length`."""
        return min(length, (start // self.prefill_chunk + 1) * self.prefill_chunk)

    def prefill_keys(self, end: int) -> int:
        """Keys that attention reads in a prompt chunk that ends at `end`."""
        return self._round_up(end, self.prefill_chunk) if self.fixed else end

    def allocation(self, capacity: int) -> int:
        """Positions to allocate so that padding beyond a full cache of `capacity` tokens still fits."""
        beside = 0 if self.fixed else (self.num_tracks - 1) * self.track_stride
        return self._round_up(capacity + self.width + beside, self.prefill_chunk)

    def within(self, max_length: int) -> Numerics:
        """This rule for sequences of at most `max_length` tokens."""
        return dataclasses.replace(self, max_keys=self.allocation(max_length)) if self.doubling else self

    @staticmethod
    def _round_up(value: int, multiple: int) -> int:
        return -(-value // multiple) * multiple
