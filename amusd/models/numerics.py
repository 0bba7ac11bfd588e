"""The rule that decides how many rows and keys a forward pass computes with. Standard library only.

A row's result depends, in its last bits, on how many rows share its matrix products and on how many keys attention sums
over. `fixed` makes both a function of the row's position alone, so that neither the length of a block nor where it was
cut (which timing decides) can reach the numbers.

Mixtures of experts stay outside this promise: how many rows share an expert's product depends on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Numerics:
    """How blocks are cut and padded. Every method is a pure function of positions and row counts."""

    width: int
    """Most rows of one verification pass; with `fixed`, the number of rows of every such pass (dummy rows added)."""
    fixed: bool
    """True: bit-exact whatever the blocks. False: as little padding as the device likes."""
    border: int = 64
    """With `fixed`: attention reads keys up to the next multiple of this, and no block crosses one."""
    prefill_chunk: int = 256
    """Prompt tokens per pass; chunks end at its multiples. A multiple of `border`."""

    def __post_init__(self) -> None:
        if self.width < 1 or self.border < 1 or self.prefill_chunk < 1:
            raise ValueError(f"width, border and prefill_chunk must be at least 1: {self}")
        if self.prefill_chunk % self.border:
            raise ValueError(f"prefill_chunk={self.prefill_chunk} must be a multiple of border={self.border}")

    def max_rows(self, start: int) -> int:
        """How many tokens one pass may carry when the first stands at position `start`."""
        return min(self.width, self.border - start % self.border) if self.fixed else self.width

    def padded_rows(self, rows: int) -> int:
        """Rows to compute for `rows` tokens: `width`, or the next power of two (at most `width`)."""
        return self.width if self.fixed else min(self.width, 1 << (rows - 1).bit_length())

    def num_keys(self, start: int, rows: int) -> int:
        """Keys that attention reads in a pass over the computed rows `[start, start + rows)` of a block."""
        return (start // self.border + 1) * self.border if self.fixed else start + rows

    def prefill_end(self, start: int, length: int) -> int:
        """Where the prompt chunk that begins at `start` ends, in a prompt that ends at `length`."""
        return min(length, (start // self.prefill_chunk + 1) * self.prefill_chunk)

    def prefill_keys(self, end: int) -> int:
        """Keys that attention reads in a prompt chunk that ends at `end`."""
        return self._round_up(end, self.prefill_chunk) if self.fixed else end

    def allocation(self, capacity: int) -> int:
        """Positions to allocate so that padding beyond a full cache of `capacity` tokens still fits."""
        return self._round_up(capacity + self.width, self.prefill_chunk)

    @staticmethod
    def _round_up(value: int, multiple: int) -> int:
        return -(-value // multiple) * multiple
