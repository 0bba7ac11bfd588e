"""Inputs and outputs of captured passes: pinned memory on the host, fixed addresses on the device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from amusd.models.attention import Attention, attend_by_table
from amusd.models.passes import POSITION

CACHE, LENGTH, LAST_ROW = range(3)
"""A sequence's cache, where its paths begin, and the place of its last real row."""
PATH = 4
"""The number of a row's path, behind what `Rows.write` writes of the row."""


class Pinned:
    """Numbers on host and device, copied without waiting."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.host: npt.NDArray[Any] = self._host.numpy()
        self.device = torch.zeros_like(self._host, device=device)

    def send(self, part: slice = slice(None)) -> None:
        """Hand these rows on to the device."""
        self.device[part].copy_(self._host[part], non_blocking=True)

    def fetch(self) -> None:
        """Have the device write to the host."""
        self._host.copy_(self.device, non_blocking=True)


class PassInputs:
    """The inputs of a pass, parts of one buffer, which is sent in one copy.

        sequences   [3, sequences]: `CACHE`, `LENGTH`, `LAST_ROW`
        rows        [5, places]: `TOKEN`, `POSITION`, `SLOT`, `PARENT`, `PATH`
        paths       [sequences, max_rows, depth]: slots from position `LENGTH` on

    Places of a sequence's rows are neighbours; those of further steps follow all rows.
    """

    def __init__(self, num_sequences: int, max_rows: int, max_steps: int, max_depth: int, device: torch.device) -> None:
        shapes = (3, num_sequences), (5, num_sequences * (max_rows + max_steps)), (num_sequences, max_rows, max_depth)
        counts = [math.prod(shape) for shape in shapes]
        self._buffer = Pinned((sum(counts),), torch.int64, device)
        self._before_paths, self._depth = counts[0] + counts[1], max_depth
        host = np.split(self._buffer.host, np.cumsum(counts)[:-1])
        self.sequences, self.rows, self.paths = (part.reshape(shape) for part, shape in zip(host, shapes, strict=True))
        sent = zip(torch.split(self._buffer.device, counts), shapes, strict=True)
        self.sent_sequences, self.sent_rows, self._sent_paths = (part.view(shape) for part, shape in sent)

    def send(self, num_paths: int) -> None:
        """Send everything, with the first paths, of which a sequence has `max_rows`."""
        self._buffer.send(slice(self._before_paths + num_paths * self._depth))

    def attention(self, table: Tensor, places: slice) -> Attention:
        """Attention of these rows, or of one step. `table`: see `attend_rows`."""
        sequences = len(table)
        positions = self.sent_rows[POSITION, places].view(sequences, -1)
        row_paths = self.sent_rows[PATH, : positions.numel()].view(positions.shape)
        lengths, branches = self.sent_sequences[LENGTH, :sequences], self._sent_paths[:sequences]
        return attend_by_table(table, lengths, branches, row_paths, positions)
