"""Passes of a few fixed shapes, captured once and replayed, so that a GPU does not wait for the host (docs/gpu.md).

A shape is the number of sequences, the rows of each, and the sampler. All else is data on the device, so chains, trees
and paths share a graph, and a rollback only changes numbers. Each further draft step is a graph that reads the token
chosen by the step before.

At a fixed width every pass has rows for all caches, and samples for one sequence or for all. Otherwise it has one
sequence or all, with one row each or `width`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from amusd.errors import ConfigError, DeviceError
from amusd.logs import logger
from amusd.models.attention import causal_attention
from amusd.models.kv_cache import KVCache
from amusd.models.passes import PADDING_ID, PARENT, POSITION, SLOT, TOKEN, ModelOutput, Rows
from amusd.runner.graphs import Replay, Work, run_each_time, send
from amusd.runner.pass_buffer import CACHE, LAST_ROW, LENGTH, PATH, PassInputs, Pinned
from amusd.sampling.sampler import RowSampler

if TYPE_CHECKING:
    from amusd.runner.model_runner import ModelRunner


_NO_POSITION = -1  # a padded row: it sees nothing


@dataclass(frozen=True, slots=True)
class PassShape:
    """The key of a captured graph."""

    rows: int
    """Rows of each sequence, padded; 1 in a further step."""
    step: int
    """0: takes in the rows of a pass; else the token chosen by the step before."""
    sampler: RowSampler | None
    """None: the most likely token."""
    sequences: int
    """Sequences that are sampled: one or all."""


class CapturedPasses:
    """Captured passes over the equally large caches of one memory."""

    def __init__(self, model: ModelRunner, caches: Sequence[KVCache]) -> None:
        self._model = model
        self._memory, self._allocated = caches[0].memory, caches[0].allocated
        self._num_caches = number = len(caches)
        self._max_rows = max_rows = model.numerics.width
        self._num_places = number * (max_rows + model.tokens_per_step)
        self.graphs: dict[PassShape, Replay] = {}
        self._logits = torch.empty(0)  # of the last pass: the graphs share them, as each would keep many megabytes
        self._words: dict[RowSampler, tuple[Pinned, Pinned]] = {}  # inputs and outputs of each sampler
        self._is_sealed = False
        self._device = device = model.device
        self._inputs = PassInputs(number, max_rows, model.tokens_per_step, max(max_rows, caches[0].spare), device)
        # The last slots of each region, which no token has and padding is written to.
        ends = self._allocated * np.arange(1, number + 1)[:, None]
        self._scratch = ends - np.arange(self._num_places // number, 0, -1)
        self._slots = Pinned((number * self._allocated,), torch.int64, device)  # of each position of each cache
        self._slots.host[:] = np.arange(number * self._allocated)
        self._slots.send()
        # The columns chosen, and the bits of the logit of each, as float64: both come to the host in one copy.
        self._results = Pinned((2, self._num_places), torch.int64, device)
        self._columns, self._largest = self._results.device[0], self._results.device[1].view(torch.float64)

    def run(self, batch: Sequence[Rows], steps: int, sampler: RowSampler | None) -> list[ModelOutput]:
        """Compute a pass and wait; returns each sequence's output."""
        count = self._model.numerics.padded_rows(max(len(rows.token_ids) for rows in batch))
        shapes = _shapes(count, steps, sampler, 1 if len(batch) == 1 else self._num_caches)
        graphs = [self._graph(shape) for shape in shapes]
        self._inputs.send(self._write(batch, shapes[0], len(shapes) - 1))
        further = [self._first_place(shape.step) for shape in shapes[1:]]
        places = [
            [*range(index * count, index * count + len(rows.token_ids)), *(first + index for first in further)]
            for index, rows in enumerate(batch)
        ]
        told = None
        if sampler is not None:
            asked, told = self._words[sampler]
            for rows, those in zip(batch, places, strict=True):
                asked.host[those] = sampler.neutral if rows.wanted is None else rows.wanted.inputs
            asked.send()
        with torch.inference_mode():
            for replay in graphs:
                replay()
            self._results.fetch()
            if told is not None:
                told.fetch()
        self._model.wait()
        outputs = []
        for index, (rows, those) in enumerate(zip(batch, places, strict=True)):
            columns, bits = self._results.host[:, those]
            others = None if told is None else told.host[those]
            scores = self._logits[index * count : index * count + len(rows.token_ids)]
            outputs.append(ModelOutput(scores, rows.wanted, columns, bits.view(np.float64), others))
        return outputs

    def prefill(self, cache: KVCache, token_ids: Sequence[int]) -> None:
        """Take in a chunk of a prompt."""
        start, count, device = cache.length, len(token_ids), self._device
        sent = send(torch.tensor(token_ids), device)
        positions = torch.arange(start, start + count, device=device)
        attention = causal_attention(start, count, cache.first)
        self._memory.slots_of_pass = positions + cache.first if cache.first else positions
        self._memory.parents_of_pass = (positions - 1).clamp_(min=0) + cache.first
        with torch.inference_mode():
            self._model.network(sent, positions, attention, self._memory, with_logits=False)
        self._model.wait()

    def _num_computed(self, shape: PassShape) -> int:
        return self._num_caches if self._model.numerics.fixed else shape.sequences

    def _places(self, shape: PassShape, sequences: int) -> slice:
        first = self._first_place(shape.step)
        return slice(first, first + sequences * shape.rows)

    def _first_place(self, step: int) -> int:
        return self._num_caches * (self._max_rows + step - 1) if step else 0

    def _write(self, batch: Sequence[Rows], shape: PassShape, num_further: int) -> int:
        """Write a pass's inputs, padding included; returns how many paths `PassInputs.send` must send."""
        self._write_padding(shape)
        inputs, num_paths, changed = self._inputs, 0, list[int]()
        for index, rows in enumerate(batch):
            cache, paths, first = rows.cache, rows.paths, index * shape.rows
            rows.write(inputs.rows, first)
            inputs.sequences[CACHE, index] = cache.number
            inputs.sequences[LAST_ROW, index] = first + len(rows.token_ids) - 1
            if paths is None:  # a chain, which is read through the table alone
                self._write_further(index, rows, num_further)
                table = cache.slots[: cache.length + len(rows.token_ids) + num_further]
            else:
                inputs.sequences[LENGTH, index] = len(paths.prefix)
                num_paths = index * self._max_rows + self._write_paths(index, first, rows)
                table = paths.prefix
            changed += self._write_table(cache, table, is_own=paths is None or rows.parents is not None)
        if changed:
            self._slots.send(slice(min(changed), max(changed) + 1))
        return num_paths

    def _write_padding(self, shape: PassShape) -> None:
        inputs, further = self._inputs, self._first_place(1)
        inputs.rows[:], inputs.rows[POSITION] = PADDING_ID, _NO_POSITION
        number = self._num_computed(shape)
        inputs.rows[SLOT, : number * shape.rows] = self._scratch[:number, : shape.rows].ravel()
        inputs.rows[SLOT, further:] = self._scratch[:, self._max_rows :].T.ravel()
        inputs.sequences[:] = 0
        inputs.sequences[LENGTH] = self._allocated

    def _write_further(self, index: int, rows: Rows, number: int) -> None:
        """Write positions and slots of a chain's further steps, up to the capacity; beyond it they are padding."""
        cache, start = rows.cache, rows.cache.length + len(rows.token_ids)
        places = slice(self._first_place(1) + index, self._first_place(number + 1), self._num_caches)
        self._inputs.rows[POSITION, places] = np.minimum(np.arange(start, start + number), self._model.max_length - 1)
        fitting = min(number, cache.capacity - start)
        self._inputs.rows[SLOT, places][:fitting] = cache.first + cache.slots[start : start + fitting]

    def _write_paths(self, index: int, first: int, rows: Rows) -> int:
        """Write a sequence's paths, and the path of its rows from `first` on; returns the number of paths.

        A row shares its path with a parent that no other row has taken.
        """
        assert rows.paths is not None
        path_of: dict[tuple[int, ...], int] = {}
        num_paths = 0
        for row, branch in sorted(enumerate(rows.paths.branches), key=lambda pair: len(pair[1])):
            slots = tuple(branch)
            number = path_of.pop(slots[:-1], None)
            if number is None:
                number, num_paths = num_paths, num_paths + 1
            path_of[slots] = self._inputs.rows[PATH, first + row] = number
            self._inputs.paths[index, number, : len(slots)] = np.add(slots, rows.cache.first)
        return num_paths

    def _write_table(self, cache: KVCache, slots: npt.NDArray[np.int64], *, is_own: bool) -> list[int]:
        """Have a cache's part of the table begin with `slots`; returns the first and last entry that changed, if any.

        `is_own`: they are the cache's own, of which the table has `num_in_table`.
        """
        start = cache.num_in_table if is_own else 0
        cache.num_in_table = len(slots) if is_own else 0
        known = self._slots.host[cache.first + start : cache.first + len(slots)]
        wanted = cache.first + slots[start:]
        changed = np.flatnonzero(known != wanted)
        known[:] = wanted
        return [cache.first + start + int(entry) for entry in (*changed[:1], *changed[-1:])]

    def prepare(self, _: KVCache, steps: int, sampler: RowSampler | None) -> None:
        """Capture all shapes now, so that no answer waits for a capture."""
        self._is_sealed = False
        row_counts = sorted({self._model.numerics.padded_rows(1), self._max_rows})
        for sequences, count in itertools.product(sorted({1, self._num_caches}), row_counts):
            for shape in _shapes(count, steps, sampler, sequences):
                self._graph(shape)
        self._is_sealed = True

    def _graph(self, shape: PassShape) -> Replay:
        if shape not in self.graphs:
            if self._is_sealed:
                raise DeviceError(f"a pass was not prepared: {shape}")
            if (sampler := shape.sampler) is not None and sampler not in self._words:
                asked = Pinned((self._num_places, sampler.num_inputs), torch.int64, self._device)
                told = Pinned((self._num_places, sampler.num_outputs), torch.int32, self._device)
                self._words[sampler] = asked, told
                asked.host[:] = sampler.neutral
                asked.send()
            self._inputs.send(self._write((), shape, shape.step))
            with torch.inference_mode():
                self.graphs[shape] = self._captured(partial(self._compute, shape))
            self._model.wait()  # then the pinned inputs may be written again
        return self.graphs[shape]

    def _captured(self, work: Work) -> Replay:
        """The graph of `work`; where it cannot be captured, `work`, and no further pass is captured.

        Raises `ConfigError` with several ranks, which capture their exchanges all or none.
        """
        model = self._model
        assert model.capture is not None
        try:
            return model.capture(work)
        except DeviceError as error:
            if model.ranks.size > 1:
                raise ConfigError(f"hardware.cuda_graphs=true: {error}; allowed here: false") from error
            logger.warning("%s computes without CUDA graphs, which is slower: %s", model.device, error)
            model.capture = run_each_time
            return work

    def _compute(self, shape: PassShape) -> None:
        inputs, memory, sequences = self._inputs, self._memory, self._num_computed(shape)
        places = self._places(shape, sequences)
        table = self._slots.device.view(self._num_caches, self._allocated)
        if self._num_caches > 1:
            table = table.index_select(0, inputs.sent_sequences[CACHE, :sequences])
        token_ids = self._token_ids(shape, sequences)
        memory.slots_of_pass = inputs.sent_rows[SLOT, places]
        memory.parents_of_pass = inputs.sent_rows[PARENT, places]
        positions = inputs.sent_rows[POSITION, places].clamp(min=0)
        attention = inputs.attention(table, places)
        logits = self._model.network(token_ids, positions, attention, memory, with_logits=True)
        sampled = self._places(shape, shape.sequences)
        self._choose(logits[: shape.sequences * shape.rows], shape.sampler, sampled)
        if shape.step == 0:
            if not self._logits.numel():  # in the first run of a pass, which is not captured yet
                self._logits = logits.new_empty((self._num_caches * self._max_rows, logits.shape[1]))
            self._logits[: len(logits)].copy_(logits)

    def _token_ids(self, shape: PassShape, sequences: int) -> Tensor:
        if shape.step == 0:
            return self._inputs.sent_rows[TOKEN, self._places(shape, sequences)]
        if shape.step == 1:
            last = self._columns.index_select(0, self._inputs.sent_sequences[LAST_ROW, :sequences])
        else:
            last = self._columns[self._places(replace(shape, step=shape.step - 1), sequences)]
        return last if self._model.output_ids is None else self._model.output_ids[last]

    def _choose(self, logits: Tensor, sampler: RowSampler | None, places: slice) -> None:
        if sampler is None:
            self._largest[places], self._columns[places] = logits.max(dim=-1)  # a NaN is the largest
            return
        asked, told = self._words[sampler]
        columns, told.device[places] = sampler.compute(logits, asked.device[places])
        self._columns[places] = columns
        self._largest[places] = logits.gather(1, columns.unsqueeze(1)).squeeze(1)


def _shapes(rows: int, steps: int, sampler: RowSampler | None, sequences: int) -> list[PassShape]:
    return [PassShape(1 if step else rows, step, sampler, sequences) for step in range(steps)]
