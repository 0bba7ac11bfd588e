"""The rule for how many rows and keys a forward pass computes with. Needs no torch.

A row's last bits depend on how many rows share its matrix products and how many keys attention sums. `fixed` makes both
a function of the position alone, so that block lengths, which timing decides, cannot change the numbers.

A pass may hold several paths that share its first token (`lay_out` in `passes.py`). Slots of rows at one position are
then a multiple of `TRACK_STRIDE` apart. That changes no bit of attention's sums: masked keys add zeros in float32, and
no key crosses the border at which kernels begin a new sum.

Mixtures of experts are not covered: the rows of an expert's product depend on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from amusd.config.decoding import MAX_VERIFY_BREADTH

PROMPT_STEP = 128
"""On a CPU chunks of a prompt end at multiples of this: attention's borders."""
TRACK_STRIDE = 16
"""Tracks are multiples of this apart: every CPU's float32 lanes (4, 8, 16) divide it."""


@dataclass(frozen=True)
class Numerics:
    """The rule by which blocks are cut and padded."""

    width: int
    """Most rows of a verification pass; with `fixed`, every pass has the bits of one with this many rows."""
    fixed: bool
    """True: equal bits whatever the blocks. False: as little padding as the device allows."""
    prefill_chunk: int = PROMPT_STEP
    """Prompt tokens per pass; chunks end at multiples of this."""
    has_borders: bool = True
    """With `fixed`: attention reads keys up to the next multiple of `prefill_chunk`, which no block crosses.

    False: sums do not depend on the number of keys, as on GPUs (`row_attention.py`).
    """
    num_tracks: int = 1
    """Rows of one position in a pass. With borders their slots are `track_stride` apart."""

    @classmethod
    def for_device(cls, device: str, *, width: int, fixed: bool) -> Numerics:
        """The rule for a device (`cpu`, `cuda:0` ...)."""
        if device == "cpu":
            # With `bucketed` each row costs a CPU time: no row is free for another path.
            return cls(width=width, fixed=fixed, num_tracks=MAX_VERIFY_BREADTH if fixed else 1)
        return cls(width=width, fixed=fixed, prefill_chunk=1024, has_borders=False, num_tracks=MAX_VERIFY_BREADTH)

    def max_rows(self, start: int) -> int:
        """Most tokens of a pass that begins at `start`."""
        border = self._border_after(start)
        return self.width if border is None else min(self.width, border - start)

    def padded_rows(self, rows: int) -> int:
        """Rows that captured passes compute for `rows` tokens: one or `width`; with `fixed` always `width`."""
        return 1 if rows == 1 and not self.fixed else self.width

    def num_keys(self, start: int, rows: int) -> int:
        """Keys that attention reads for the computed rows `[start, start + rows)` of a block."""
        return self._border_after(start) or start + rows

    @property
    def track_stride(self) -> int:
        """Slots between tracks: at least `width`."""
        return self._round_up(self.width, TRACK_STRIDE)

    def tracks_at(self, start: int) -> int:
        """Tracks of a pass that begins at `start` (at least 1)."""
        border = self._border_after(start)
        if border is None or self.num_tracks == 1:
            return self.num_tracks
        num_free = border - start - self.max_rows(start)
        return min(self.num_tracks, 1 + num_free // self.track_stride)

    def prefill_end(self, start: int, length: int) -> int:
        """End of the prompt chunk that begins at `start`, in a prompt of `length`."""
        return min(length, (start // self.prefill_chunk + 1) * self.prefill_chunk)

    def allocation(self, capacity: int) -> int:
        """Positions to allocate so that padding beyond `capacity` tokens fits."""
        rows = capacity + self.width
        return self._round_up(rows, self.prefill_chunk) if self.has_borders else rows

    def _border_after(self, position: int) -> int | None:
        if not (self.fixed and self.has_borders):
            return None
        return (position // self.prefill_chunk + 1) * self.prefill_chunk

    @staticmethod
    def _round_up(value: int, multiple: int) -> int:
        return -(-value // multiple) * multiple
