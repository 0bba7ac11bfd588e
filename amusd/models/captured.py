"""Passes of a few fixed shapes over one memory, captured once and replayed, so that a GPU never waits for the host.

The shape of a pass is its number of sequences, the rows of each, and the sampler at its end (none: the most likely
tokens). Everything else is data on the device: the tokens, where each row stands and what it
sees (`attend_rows`). So a chain, a tree and several paths are one graph, and a rollback changes numbers only. Each
further draft step is a graph of its own, which reads the token that the step before it chose. The host writes all
inputs, launches as many graphs as there are steps, and waits for one event (docs/gpu.md).

At a fixed width all passes of a memory have one shape, with rows for every cache. Otherwise sequences come in powers of
two, with one row each or `width`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from amusd.errors import DeviceError, RankLostError
from amusd.models.attention import CausalAttention, TableAttention
from amusd.models.graphs import Capture, Completion, Replay
from amusd.models.kv_cache import PreallocatedCache
from amusd.models.language_model import ModelOutput, Sampler
from amusd.models.numerics import Numerics
from amusd.models.passes import Network, Part, PartOutput, Pass, Slots
from amusd.models.sharding import Ranks

_NO_POSITION = -1  # a padded row: it sees nothing


@dataclass(frozen=True, slots=True)
class PassShape:
    """The key of a captured graph."""

    rows: int
    """Rows of each sequence, padding included; 1 in a further step."""
    step: int = 0
    """0: takes in the rows of a pass; else the token that the graph of the step before has chosen."""
    sampler: Sampler | None = None
    """What chooses from each row's logits; None: the most likely token."""
    sequences: int = 1
    """Sequences of the pass, padding included."""


class _SamplerBuffers:
    """Inputs and outputs of one sampler, for each row and each step of each sequence."""

    def __init__(self, sampler: Sampler, count: int, device: torch.device) -> None:
        is_pinned = device.type == "cuda"
        self._host_inputs = torch.zeros((count, sampler.num_inputs), dtype=torch.int64, pin_memory=is_pinned)
        self._host_inputs[:] = torch.from_numpy(sampler.neutral)
        self.inputs = self._host_inputs.to(device)
        self._host_outputs = torch.zeros((count, sampler.num_outputs), dtype=torch.int32, pin_memory=is_pinned)
        self.outputs = torch.zeros_like(self._host_outputs, device=device)
        self.host_inputs: npt.NDArray[np.int64] = self._host_inputs.numpy()
        """[count, words], which the host writes before `send`."""
        self.host_outputs: npt.NDArray[np.int32] = self._host_outputs.numpy()
        """[count, words], which the host reads after a pass."""

    def send(self, rows: slice) -> None:
        """Hand these inputs on to the device. Does not wait."""
        self.inputs[rows].copy_(self._host_inputs[rows], non_blocking=True)

    def fetch(self, rows: slice) -> None:
        """Have the device write these outputs to the host. Does not wait."""
        self._host_outputs[rows].copy_(self.outputs[rows], non_blocking=True)


class _Inputs:
    """The inputs that the host writes before a pass: one pinned buffer, sent in one copy.

    sequences   the cache of each, its length, and which of its rows is the last real one
    rows        tokens, positions, slots, the slots before them, and which path each row is on: those of a sequence are
                neighbours
    steps       positions and slots of each further step, in one piece with those of the rows
    paths       the slots of each path of each sequence from position `length` on; a chain needs none
    """

    def __init__(self, num_sequences: int, max_rows: int, max_steps: int, max_depth: int, device: torch.device) -> None:
        self._max_depth = max_depth
        num_rows = num_sequences * max_rows
        num_all = num_rows + num_sequences * max_steps
        counts = (num_sequences,) * 3 + (num_rows,) * 3 + (num_all, num_all, num_rows * max_depth)
        self._host = torch.zeros(sum(counts), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.zeros_like(self._host, device=device)
        host = np.split(self._host.numpy(), np.cumsum(counts)[:-1])
        on_device = torch.split(self._device, list(counts))
        self.caches, self.last_rows, self.lengths, self.token_ids, self.row_paths, self.parents = host[:6]
        self.positions, self.slots = host[6:8]
        self.paths = host[8].reshape(num_sequences, max_rows, max_depth)
        self._num_before_paths = sum(counts[:-1])
        self.device_caches, self.device_last_rows, self._lengths, self.device_token_ids, self._row_paths = on_device[:5]
        self.device_parents, self.device_positions, self.device_slots = on_device[5:8]
        self._branches = on_device[8].view(num_sequences, max_rows, max_depth)

    def send(self, num_paths: int) -> None:
        """Hand everything to the device, and the first paths, of which a sequence has `max_rows`. Does not wait."""
        count = self._num_before_paths + num_paths * self._max_depth
        self._device[:count].copy_(self._host[:count], non_blocking=True)

    def attention(self, table: Tensor, rows: slice) -> TableAttention:
        """The attention of these rows, or of one step. `table`: see `TableAttention`."""
        sequences = len(table)
        positions = self.device_positions[rows].view(sequences, -1)
        row_paths = self._row_paths[: positions.numel()].view(positions.shape)
        return TableAttention(table, self._lengths[:sequences], self._branches[:sequences], row_paths, positions)


class CapturedPasses:
    """Runs a network over the caches of one memory in captured passes."""

    def __init__(
        self,
        network: Network,
        numerics: Numerics,
        caches: Sequence[PreallocatedCache],
        *,
        max_length: int,
        max_steps: int,
        output_ids: Tensor | None,
        capture: Capture,
        ranks: Ranks,
    ) -> None:
        """`caches`: all of the memory, in their order; they have one size.

        `max_length`: positions that the model knows; `output_ids`: see `LanguageModel`; `ranks`: of the network.
        """
        self._network = network
        self._numerics = numerics
        self._memory = caches[0].memory
        self._allocated = allocated = caches[0].allocated
        self._num_caches = number = len(caches)
        self._last_position = max_length - 1
        self._max_rows = max_rows = numerics.width
        self._max_steps = max_steps
        self._output_ids = output_ids
        self._capture = capture
        self._ranks = ranks
        self._graphs: dict[PassShape, tuple[Replay, list[Tensor]]] = {}  # with the logits of each, one tensor
        self._sampled: dict[Sampler, _SamplerBuffers] = {}
        self._is_sealed = False
        device = network.device
        self._is_pinned = device.type == "cuda"
        self._inputs = _Inputs(number, max_rows, max_steps, max(max_rows, caches[0].spare), device)
        self._host_tables = torch.arange(number * allocated, pin_memory=self._is_pinned)
        self._tables = self._host_tables.to(device).view(number, allocated)  # the slots in memory of each position
        # The columns chosen, and the bits of the logit of each, as float64: both come to the host in one copy.
        self._num_all = number * (max_rows + max_steps)
        self._host_results = torch.zeros((2, self._num_all), dtype=torch.int64, pin_memory=self._is_pinned)
        self._results = torch.zeros_like(self._host_results, device=device)
        self._columns, self._largest = self._results[0], self._results[1].view(torch.float64)
        host_columns, host_largest = self._host_results.numpy()
        self._host_columns, self._host_largest = host_columns, host_largest.view(np.float64)
        self._completion = Completion(device)

    def run(self, work: Pass) -> list[PartOutput]:
        """Compute a pass and wait for it.

        Returns the logits [tokens, vocab] of each part, and [1, vocab] for each further step, valid until the next
        pass; nothing for a prompt in order. After several steps the cache holds neither the last token nor
        those that do not fit.
        """
        first = work.parts[0]
        if not first.token_ids:
            for sequences in self._sequence_counts:
                for rows in self._numerics.row_counts:
                    self.prepare(PassShape(rows, 0, work.sampler, sequences))
                for step in range(1, work.steps):
                    self.prepare(PassShape(1, step, work.sampler, sequences))
            return []
        if not work.with_logits and first.cache.is_in_order(first.cache.length + len(first.token_ids)):
            self._prefill(first)
            return []
        rows = self._numerics.padded_rows(max(len(part.token_ids) for part in work.parts))
        sequences = next(number for number in self._sequence_counts if number >= len(work.parts))
        shapes = [PassShape(rows, 0, work.sampler, sequences)]
        shapes += [PassShape(1, step, work.sampler, sequences) for step in range(1, work.steps)]
        self._inputs.send(self._write_parts(work.parts, shapes[0], work.steps - 1))
        # Of samplers as far as the last real row, and all steps.
        in_use = [slice((len(work.parts) - 1) * rows + len(work.parts[-1].token_ids))]
        if work.steps > 1:
            in_use.append(slice(self._places(shapes[1]).start, self._places(shapes[-1]).stop))
        if work.sampler is not None:
            self._write_sampler_inputs(work.parts, shapes[0], work.sampler, work.steps - 1)
            for places in in_use:
                self._buffers(work.sampler).send(places)
        logits = self._replay(shapes, in_use)
        outputs = []
        for index, part in enumerate(work.parts):
            outputs.append(self._output(shapes, logits, index, len(part.token_ids)))
            if part.rows is None:
                free = part.cache.capacity - part.cache.length
                part.cache.advance(min(len(part.token_ids) + work.steps - 1, free))
        return outputs

    @property
    def _sequence_counts(self) -> list[int]:
        """The numbers of sequences that are computed."""
        if self._numerics.fixed:
            return [self._num_caches]
        powers = (1 << power for power in range(self._num_caches.bit_length()))
        return [*(number for number in powers if number < self._num_caches), self._num_caches]

    def _prefill(self, part: Part) -> None:
        """Take in a chunk of a prompt. Not captured: its shape is the prompt's."""
        cache, rows = part.cache, len(part.token_ids)
        start = cache.length
        on_host = torch.tensor(part.token_ids, pin_memory=self._is_pinned)
        positions = torch.arange(start, start + rows, device=self._network.device)
        self._memory.slots_of_pass = positions + cache.first if cache.first else positions
        with torch.inference_mode():
            self._network(
                on_host.to(self._network.device, non_blocking=True),
                positions,
                CausalAttention(start, rows, cache.first),
                cache.memory,
                with_logits=False,
            )
        cache.advance(rows)
        self._wait()

    def _output(self, shapes: Sequence[PassShape], logits: Sequence[Tensor], index: int, count: int) -> PartOutput:
        """The results of the part with this index, which has `count` rows and one more for each further step."""
        outputs = []
        for shape, scores in zip(shapes, logits, strict=True):
            first, number = index * shape.rows, 1 if shape.step else count
            place = self._places(shape).start + first
            rows = slice(place, place + number)
            outputs.append(self._model_output(scores[first : first + number], rows, shape.sampler))
        return outputs

    def _model_output(self, logits: Tensor, rows: slice, sampler: Sampler | None) -> ModelOutput:
        outputs = None if sampler is None else self._buffers(sampler).host_outputs[rows].copy()
        return ModelOutput(logits, self._host_columns[rows].copy(), self._host_largest[rows].copy(), outputs)

    def _places(self, shape: PassShape) -> slice:
        """The places of the inputs and results of a graph: those of further steps stand behind those of all rows."""
        first = self._num_caches * (self._max_rows + shape.step - 1) if shape.step else 0
        return slice(first, first + shape.sequences * shape.rows)

    def _steps_of(self, index: int, number: int) -> slice:
        """The places of the first steps of the sequence with this index."""
        first = self._num_caches * self._max_rows + index
        return slice(first, first + self._num_caches * number, self._num_caches)

    def prepare(self, shape: PassShape) -> None:
        """Capture this shape now. The scratch slots at the end of regions are overwritten, nothing else.

        From then on each pass must be of a prepared shape, so that no answer waits for a capture.
        """
        self._is_sealed = False
        self._write_parts((), shape, shape.step)
        self._inputs.send(0)
        self._captured(shape)
        self._is_sealed = True

    def _replay(self, shapes: Sequence[PassShape], in_use: Sequence[slice]) -> list[Tensor]:
        """Launch these graphs one behind another; returns the logits of each once the last one is done.

        `in_use`: the places whose sampler's outputs the host gets.
        """
        captured = [self._captured(shape) for shape in shapes]
        with torch.inference_mode():
            for replay, _ in captured:
                replay()
            self._host_results.copy_(self._results, non_blocking=True)
            if (sampler := shapes[0].sampler) is not None:
                for places in in_use:
                    self._buffers(sampler).fetch(places)
        self._wait()
        return [scores for _, [scores] in captured]

    def _wait(self) -> None:
        """Wait for the device. Raises `DeviceError` when it takes too long, `RankLostError` for several ranks."""
        try:
            self._completion.wait(self._ranks.check)
        except DeviceError as error:
            if self._ranks.size == 1:
                raise
            self._ranks.abort()
            raise RankLostError(f"a rank of the target is silent: {error}") from None
        if self._ranks.rank == 0:  # which alone uses the results
            self._ranks.check()

    # The inputs of a pass. The last replay is over, so nothing reads its inputs any more.

    def _write_parts(self, parts: Sequence[Part], shape: PassShape, num_single: int) -> int:
        """Write the inputs of a pass, padding included; returns how many paths `_Inputs.send` has to hand on.

        `shape`: of its rows; `num_single`: further steps, of one row each. Padded rows see nothing and write to scratch
        slots. Chains are read through the table alone, so they need no paths.
        """
        inputs, rows = self._inputs, shape.rows
        num_paths = 0
        tables: list[tuple[PreallocatedCache, Slots]] = []
        for index in range(shape.sequences):
            part = parts[index] if index < len(parts) else None
            cache_number = part.cache.number if part is not None else 0
            count = 0 if part is None else len(part.token_ids)
            first, end = index * rows, (index + 1) * rows
            inputs.caches[index] = cache_number
            inputs.last_rows[index] = first + max(count - 1, 0)
            inputs.lengths[index] = self._allocated  # all of a chain is read through the table
            scratch = (cache_number + 1) * self._allocated  # the end of the region, whose last slots no token has
            inputs.token_ids[first + count : end] = 0
            inputs.positions[first + count : end] = _NO_POSITION
            inputs.slots[first + count : end] = np.arange(scratch - rows + count, scratch)
            singles = self._steps_of(index, num_single)
            inputs.positions[singles] = _NO_POSITION
            inputs.slots[singles] = np.arange(scratch - num_single, scratch)
            if part is None:
                continue
            cache = part.cache
            inputs.token_ids[first : first + count] = part.token_ids
            if part.rows is not None:
                num_paths = index * self._max_rows + self._write_paths(part, index, rows)
                tables.append((cache, part.rows.prefix))
                continue
            start = cache.length
            last = start + count
            inputs.positions[first : first + count] = np.arange(start, last)
            inputs.slots[first : first + count] = cache.first + cache.slots[start:last]
            fitting = min(num_single, cache.capacity - last)
            inputs.positions[singles] = np.minimum(np.arange(last, last + num_single), self._last_position)
            inputs.slots[self._steps_of(index, fitting)] = cache.first + cache.slots[last : last + fitting]
            tables.append((cache, cache.slots[: last + num_single]))
        self._send_tables(tables)
        return num_paths

    def _write_paths(self, part: Part, index: int, rows: int) -> int:
        """Rows on paths behind a prefix; returns how many. A row that is followed by one other row shares its path."""
        inputs, where, first_slot = self._inputs, part.rows, part.cache.first
        assert where is not None
        first, count = index * rows, len(part.token_ids)
        path_of: dict[tuple[int, ...], int] = {}
        num_paths = 0
        for row in sorted(range(count), key=lambda row: len(where.paths[row])):
            slots = tuple(where.paths[row])
            path = path_of.pop(slots[:-1], None)
            if path is None:
                path, num_paths = num_paths, num_paths + 1
            path_of[slots] = path
            inputs.row_paths[first + row] = path
            inputs.paths[index, path, : len(slots)] = np.add(slots, first_slot)
        inputs.row_paths[first + count : first + rows] = 0
        inputs.lengths[index] = len(where.prefix)
        inputs.positions[first : first + count] = where.positions
        inputs.slots[first : first + count] = np.add(where.slots, first_slot)
        inputs.parents[first : first + count] = np.add(where.parents, first_slot)
        return num_paths

    def _send_tables(self, tables: Sequence[tuple[PreallocatedCache, Slots]]) -> None:
        """Tell the device the slots of the first positions of caches, as far as it does not know them: in one copy."""
        host = self._host_tables.numpy()
        first, end = len(host), 0
        for cache, slots in tables:
            known = host[cache.first : cache.first + len(slots)]
            changed = np.flatnonzero(known != cache.first + slots)
            if len(changed):
                known[:] = cache.first + slots
                first = min(first, cache.first + int(changed[0]))
                end = max(end, cache.first + int(changed[-1]) + 1)
        if first < end:
            self._tables.view(-1)[first:end].copy_(self._host_tables[first:end], non_blocking=True)

    def _write_sampler_inputs(self, parts: Sequence[Part], shape: PassShape, sampler: Sampler, num_single: int) -> None:
        """Write what parts want of the sampler; neutral words otherwise."""
        buffers, neutral = self._buffers(sampler), sampler.neutral
        for index, part in enumerate(parts):
            first, count = index * shape.rows, len(part.token_ids)
            for rows in (slice(first, first + count), self._steps_of(index, num_single)):
                buffers.host_inputs[rows] = neutral
            if part.wanted is not None:
                inputs = part.wanted.inputs
                buffers.host_inputs[first : first + count, : inputs.shape[1]] = inputs[:count]
                buffers.host_inputs[self._steps_of(index, num_single), : inputs.shape[1]] = inputs[count:]

    def _buffers(self, sampler: Sampler) -> _SamplerBuffers:
        if sampler not in self._sampled:
            self._sampled[sampler] = _SamplerBuffers(sampler, self._num_all, self._network.device)
        return self._sampled[sampler]

    # The work of a replay.

    def _captured(self, shape: PassShape) -> tuple[Replay, list[Tensor]]:
        known = self._graphs.get(shape)
        if known is None:
            if self._is_sealed:
                raise DeviceError(f"a pass was not prepared: {shape}")
            logits: list[Tensor] = []
            if shape.sampler is not None:
                self._buffers(shape.sampler)  # memory on the host cannot be had in a capture

            def work() -> None:
                logits[:] = [self._compute(shape)]

            with torch.inference_mode():
                known = self._graphs[shape] = (self._capture(work), logits)
        return known

    def _compute(self, shape: PassShape) -> Tensor:
        """The logits of the rows of a pass, or of one further step; chooses the column behind each row."""
        rows, sequences = self._places(shape), shape.sequences
        table = self._tables
        if self._num_caches > 1:
            table = table.index_select(0, self._inputs.device_caches[:sequences])
        logits = self._run(self._token_ids(shape), rows, table)
        self._choose(logits, shape.sampler, rows)
        return logits

    def _token_ids(self, shape: PassShape) -> Tensor:
        """What a graph takes in: the tokens that the host has sent, or those that the step before has chosen."""
        if shape.step == 0:
            return self._inputs.device_token_ids[self._places(shape)]
        if shape.step == 1:
            last = self._columns.index_select(0, self._inputs.device_last_rows[: shape.sequences])
        else:
            last = self._columns[self._places(replace(shape, step=shape.step - 1))]
        return last if self._output_ids is None else self._output_ids[last]

    def _run(self, token_ids: Tensor, rows: slice, table: Tensor) -> Tensor:
        inputs = self._inputs
        memory = self._memory
        memory.slots_of_pass = inputs.device_slots[rows]
        memory.parents_of_pass = inputs.device_parents[: len(token_ids)]
        positions = inputs.device_positions[rows].clamp(min=0)
        logits = self._network(token_ids, positions, inputs.attention(table, rows), memory, with_logits=True)
        assert logits is not None
        return logits

    def _choose(self, logits: Tensor, sampler: Sampler | None, rows: slice) -> None:
        """The column behind each row, its logit, and what else the sampler tells the host."""
        if sampler is None:
            self._largest[rows], self._columns[rows] = logits.max(dim=-1)  # a NaN is the largest
            return
        buffers = self._buffers(sampler)
        columns, buffers.outputs[rows] = sampler.compute(logits, buffers.inputs[rows])
        self._columns[rows] = columns
        self._largest[rows] = logits.gather(1, columns.unsqueeze(1)).squeeze(1)
