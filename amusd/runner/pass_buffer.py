"""Inputs and outputs of passes: numbers for each row and sequence, on host and device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from amusd.models.attention import Attention, attend_by_table
from amusd.models.kv_cache import KVCache
from amusd.models.passes import Rows
from amusd.sampling.sampler import RowSampler

if TYPE_CHECKING:
    from amusd.runner.model_runner import ModelRunner

TOKEN, POSITION, SLOT, PARENT, PATH = range(5)
"""Indices in `PassInputs.rows`: token id, position, slot in the memory, slot of the token before, the path's number."""
CACHE, LENGTH, LAST_ROW = range(3)
"""Indices in `PassInputs.sequences`: number of the cache, position where paths begin, place of the last real row."""
PADDING_ID = 0
_NO_POSITION = -1  # a padded row: it sees nothing


def write_rows(inputs: npt.NDArray[np.int64], first: int, rows: Rows) -> None:
    """Write all but `PATH` of one sequence's rows to columns of `inputs` [4 or more, places], from `first` on."""
    cache, paths, count = rows.cache, rows.paths, len(rows.token_ids)
    columns = inputs[:, first : first + count]
    columns[TOKEN] = rows.token_ids
    if paths is None:
        columns[POSITION] = positions = np.arange(cache.length, cache.length + count)
        columns[SLOT] = cache.slots[positions]
        columns[PARENT] = cache.slots[np.maximum(positions - 1, 0)]
    else:
        columns[POSITION], columns[SLOT], columns[PARENT] = paths.positions, paths.slots, paths.parents
    columns[[SLOT, PARENT]] += cache.first


class Pinned:
    """Numbers on host and device, copied without waiting."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.host: npt.NDArray[Any] = self._host.numpy()
        self.device = torch.zeros_like(self._host, device=device)

    def send(self, part: slice = slice(None)) -> None:
        """Copy these rows to the device."""
        self.device[part].copy_(self._host[part], non_blocking=True)

    def fetch(self) -> None:
        """Copy all numbers to the host."""
        self._host.copy_(self.device, non_blocking=True)


class SamplerBuffer:
    """The inputs [places, inputs] and outputs [places, num_outputs] of one sampler."""

    def __init__(self, sampler: RowSampler, num_places: int, device: torch.device) -> None:
        self._neutral = sampler.neutral
        self.inputs = Pinned((num_places, len(sampler.neutral)), torch.int64, device)
        self.outputs = Pinned((num_places, sampler.num_outputs), torch.int32, device)
        self.inputs.host[:] = sampler.neutral
        self.inputs.send()

    def send(self, batch: Sequence[Rows], places: Sequence[Sequence[int]]) -> None:
        """Write each sequence's inputs to its places, and send all inputs."""
        for rows, those in zip(batch, places, strict=True):
            self.inputs.host[those] = self._neutral if rows.wanted is None else rows.wanted.inputs
        self.inputs.send()


class PassInputs:
    """The inputs of a captured pass: parts of one buffer that is sent in one copy.

        sequences   [3, caches]: `CACHE`, `LENGTH`, `LAST_ROW`
        rows        [5, places]: `TOKEN`, `POSITION`, `SLOT`, `PARENT`, `PATH`
        paths       [caches, max_rows, depth]: slots from position `LENGTH` on

    A sequence's rows have neighbouring places; further steps follow all rows. The table has the slot of each position
    of each cache. It is a buffer of its own, since little of it changes.
    """

    def __init__(self, model: ModelRunner, caches: Sequence[KVCache]) -> None:
        self._num_caches, self._allocated = number, allocated = len(caches), caches[0].allocated
        self._max_length, self._max_rows = model.max_length, model.numerics.width
        self._depth = max(self._max_rows, caches[0].spare)
        num_places_of_each = self._max_rows + model.tokens_per_step
        self.num_places = number * num_places_of_each
        shapes = (3, number), (5, self.num_places), (number, self._max_rows, self._depth)
        counts = [math.prod(shape) for shape in shapes]
        self._buffer = Pinned((sum(counts),), torch.int64, model.device)
        self._before_paths = counts[0] + counts[1]
        host = zip(np.split(self._buffer.host, np.cumsum(counts)[:-1]), shapes, strict=True)
        self._sequences, self._rows, self._paths = (part.reshape(shape) for part, shape in host)
        sent = zip(torch.split(self._buffer.device, counts), shapes, strict=True)
        self.sequences, self.rows, self._sent_paths = (part.view(shape) for part, shape in sent)
        self._table = Pinned((number * allocated,), torch.int64, model.device)
        self._table.host[:] = np.arange(number * allocated)
        self._table.send()
        self._unsent: list[int] = []  # the first and last entry of each change of the table
        # The last slots of each cache hold no tokens: padding is written to them.
        ends = allocated * np.arange(1, number + 1)[:, None]
        self._scratch = ends - np.arange(num_places_of_each, 0, -1)

    def places(self, step: int, num_places: int) -> slice:
        """The first `num_places` places of a pass's rows (step 0) or of a further step."""
        first = self._first_place(step)
        return slice(first, first + num_places)

    def attention(self, places: slice, sequences: int) -> Attention:
        """Attention of the rows, or of one step, at these places."""
        table = self._table.device.view(self._num_caches, self._allocated)
        if self._num_caches > 1:
            table = table.index_select(0, self.sequences[CACHE, :sequences])
        positions = self.rows[POSITION, places].view(sequences, -1)
        row_paths = self.rows[PATH, : positions.numel()].view(positions.shape)
        lengths, branches = self.sequences[LENGTH, :sequences], self._sent_paths[:sequences]
        return attend_by_table(table, lengths, branches, row_paths, positions)

    def send(self, batch: Sequence[Rows], rows: int, sequences: int, num_further: int) -> list[list[int]]:
        """Send a pass padded to `sequences` times `rows` rows; returns the places of each sequence of `batch`.

        A sequence's places are those of its rows, then one for each of `num_further` steps.
        """
        self._write_padding(rows, sequences)
        num_paths, places = 0, list[list[int]]()
        for index, each in enumerate(batch):
            cache, paths, first, count = each.cache, each.paths, index * rows, len(each.token_ids)
            write_rows(self._rows, first, each)
            self._sequences[CACHE, index] = cache.number
            self._sequences[LAST_ROW, index] = first + count - 1
            if paths is None:  # a chain, which is read through the table alone
                self._write_further(index, each, num_further)
                slots = cache.slots[: cache.length + count + num_further]
            else:
                self._sequences[LENGTH, index] = len(paths.prefix)
                num_paths = index * self._max_rows + self._write_paths(index, first, each)
                slots = paths.prefix
            self._write_table(cache, slots, is_own=paths is None or each.parents is not None)
            further = (self._first_place(step) + index for step in range(1, num_further + 1))
            places.append([*range(first, first + count), *further])
        if self._unsent:
            self._table.send(slice(min(self._unsent), max(self._unsent) + 1))
            self._unsent.clear()
        self._buffer.send(slice(self._before_paths + num_paths * self._depth))
        return places

    def _first_place(self, step: int) -> int:
        return self._num_caches * (self._max_rows + step - 1) if step else 0

    def _write_padding(self, rows: int, sequences: int) -> None:
        self._rows[:], self._rows[POSITION] = PADDING_ID, _NO_POSITION
        self._rows[SLOT, : sequences * rows] = self._scratch[:sequences, :rows].ravel()
        self._rows[SLOT, self._first_place(1) :] = self._scratch[:, self._max_rows :].T.ravel()
        self._sequences[:] = 0
        self._sequences[LENGTH] = self._allocated

    def _write_further(self, index: int, rows: Rows, num_steps: int) -> None:
        """Write positions and slots of a chain's further steps; steps beyond the capacity are padding."""
        cache, start = rows.cache, rows.cache.length + len(rows.token_ids)
        places = slice(self._first_place(1) + index, self._first_place(num_steps + 1), self._num_caches)
        self._rows[POSITION, places] = np.minimum(np.arange(start, start + num_steps), self._max_length - 1)
        fitting = min(num_steps, cache.capacity - start)
        self._rows[SLOT, places][:fitting] = cache.first + cache.slots[start : start + fitting]

    def _write_paths(self, index: int, first: int, rows: Rows) -> int:
        """Write a sequence's paths, and the path of its rows from `first` on; returns the number of paths.

        A row continues its parent's path, unless another row already does.
        """
        assert rows.paths is not None
        path_of: dict[tuple[int, ...], int] = {}
        num_paths = 0
        for row, branch in sorted(enumerate(rows.paths.branches), key=lambda pair: len(pair[1])):
            slots = tuple(branch)
            number = path_of.pop(slots[:-1], None)
            if number is None:
                number, num_paths = num_paths, num_paths + 1
            path_of[slots] = self._rows[PATH, first + row] = number
            self._paths[index, number, : len(slots)] = np.add(slots, rows.cache.first)
        return num_paths

    def _write_table(self, cache: KVCache, slots: npt.NDArray[np.int64], *, is_own: bool) -> None:
        """Write `slots` to the start of a cache's part of the table.

        `is_own`: `slots` are the cache's, and the table has `num_in_table` of them. Changes are noted before they are
        written and counted after, so that an interrupt loses none.
        """
        start = cache.num_in_table if is_own else 0
        cache.num_in_table = 0
        known = self._table.host[cache.first + start : cache.first + len(slots)]
        wanted = cache.first + slots[start:]
        changed = np.flatnonzero(known != wanted)
        self._unsent += [cache.first + start + int(entry) for entry in (*changed[:1], *changed[-1:])]
        known[:] = wanted
        cache.num_in_table = len(slots) if is_own else 0
