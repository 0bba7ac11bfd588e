"""Passes of a few fixed shapes, captured once and replayed, so that a GPU does not wait for the host (docs/gpu.md).

A shape is the number of sequences, the rows of each, and the sampler. All else is data on the device (`PassInputs`), so
chains, trees and paths share a graph, and a rollback only changes numbers. Each further draft step has a graph, which
reads the token chosen by the step before.

With `fixed` every pass computes `width` rows of each cache and samples one sequence or all. Otherwise a pass computes
one sequence or all, with one row or `width` rows each.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from amusd.errors import ConfigError, DeviceError
from amusd.logs import logger
from amusd.models.attention import causal_attention
from amusd.models.kv_cache import KVCache, PassMemory
from amusd.models.passes import ModelOutput, Rows
from amusd.runner.graphs import Replay, Work, run_each_time
from amusd.runner.pass_buffer import LAST_ROW, PARENT, POSITION, SLOT, TOKEN, PassInputs, Pinned, SamplerBuffer
from amusd.sampling.sampler import RowSampler, send

if TYPE_CHECKING:
    from amusd.runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class PassShape:
    """The key of a captured graph."""

    rows: int
    """Rows of each sequence, padded; 1 in a further step."""
    step: int
    """0: the inputs are a pass's rows; else the token of the step before."""
    sampler: RowSampler | None
    """None: the most likely token."""
    sequences: int
    """Number of sequences that are sampled: one or all."""


class CapturedPasses:
    """Captured passes over the equally large caches of one memory."""

    def __init__(self, model: ModelRunner, caches: Sequence[KVCache]) -> None:
        self._model, self._memory, self._num_caches = model, caches[0].memory, len(caches)
        self.graphs: dict[PassShape, Replay] = {}
        self._logits = torch.empty(0)  # of the last pass; graphs share the tensor, since each would keep many megabytes
        self._is_sealed = False
        self._inputs = PassInputs(model, caches)
        self._buffers: dict[RowSampler, SamplerBuffer] = {}
        # The chosen columns, and the bits of their float64 logits: one copy brings both to the host.
        self._results = Pinned((2, self._inputs.num_places), torch.int64, model.device)
        self._columns, self._largest = self._results.device[0], self._results.device[1].view(torch.float64)

    def run(self, batch: Sequence[Rows], steps: int, sampler: RowSampler | None) -> list[ModelOutput]:
        """Compute a pass and wait; returns each sequence's output."""
        count = self._model.numerics.padded_rows(max(len(rows.token_ids) for rows in batch))
        shapes = _shapes(count, steps, sampler, 1 if len(batch) == 1 else self._num_caches)
        graphs = [self._graph(shape) for shape in shapes]
        places = self._inputs.send(batch, count, self._num_computed(shapes[0]), steps - 1)
        buffer = None if sampler is None else self._buffers[sampler]
        if buffer is not None:
            buffer.send(batch, places)
        with torch.inference_mode():
            for replay in graphs:
                replay()
            self._results.fetch()
            if buffer is not None:
                buffer.outputs.fetch()
        self._model.wait()
        outputs = []
        for index, (rows, those) in enumerate(zip(batch, places, strict=True)):
            columns, bits = self._results.host[:, those]
            others = None if buffer is None else buffer.outputs.host[those]
            scores = self._logits[index * count : index * count + len(rows.token_ids)]
            outputs.append(ModelOutput(scores, rows.wanted, columns, bits.view(np.float64), others))
        return outputs

    def prefill(self, cache: KVCache, token_ids: Sequence[int]) -> None:
        """Take in a chunk of a prompt."""
        start, count, device = cache.length, len(token_ids), self._model.device
        sent = send(torch.tensor(token_ids), device)
        positions = torch.arange(start, start + count, device=device)
        attention = causal_attention(start, count, cache.first)
        slots = positions + cache.first if cache.first else positions
        memory = PassMemory(self._memory, slots, (positions - 1).clamp_(min=0) + cache.first)
        with torch.inference_mode():
            self._model.network(sent, positions, attention, memory, with_logits=False)
        self._model.wait()

    def prepare(self, _: KVCache, steps: int, sampler: RowSampler | None) -> None:
        """Capture all shapes now, so that no answer waits for a capture."""
        self._is_sealed = False
        numerics = self._model.numerics
        row_counts = sorted({numerics.padded_rows(1), numerics.width})
        for sequences, count in itertools.product(sorted({1, self._num_caches}), row_counts):
            for shape in _shapes(count, steps, sampler, sequences):
                self._graph(shape)
        self._is_sealed = True

    def _num_computed(self, shape: PassShape) -> int:
        """Number of sequences that a pass computes."""
        return self._num_caches if self._model.numerics.fixed else shape.sequences

    def _graph(self, shape: PassShape) -> Replay:
        if shape not in self.graphs:
            if self._is_sealed:
                raise DeviceError(f"a pass was not prepared: {shape}")
            if (sampler := shape.sampler) is not None and sampler not in self._buffers:
                self._buffers[sampler] = SamplerBuffer(sampler, self._inputs.num_places, self._model.device)
            self._inputs.send((), shape.rows, self._num_computed(shape), shape.step)
            with torch.inference_mode():
                self.graphs[shape] = self._captured(partial(self._compute, shape))
            self._model.wait()  # afterwards the pinned inputs may be overwritten
        return self.graphs[shape]

    def _captured(self, work: Work) -> Replay:
        """Capture `work`; if that fails, return `work` itself, and capture no further pass.

        With several ranks, which must all capture or none, a failure is a `ConfigError`.
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
        inputs, sequences = self._inputs, self._num_computed(shape)
        places = inputs.places(shape.step, sequences * shape.rows)
        memory = PassMemory(self._memory, inputs.rows[SLOT, places], inputs.rows[PARENT, places])
        token_ids = self._token_ids(shape.step, places, sequences)
        positions, attention = inputs.rows[POSITION, places].clamp(min=0), inputs.attention(places, sequences)
        logits = self._model.network(token_ids, positions, attention, memory, with_logits=True)
        number = shape.sequences * shape.rows
        self._choose(logits[:number], shape.sampler, inputs.places(shape.step, number))
        if shape.step == 0:
            if not self._logits.numel():  # in the first run of a pass, which is not captured yet
                most = self._num_caches * self._model.numerics.width
                self._logits = logits.new_empty((most, logits.shape[1]))
            self._logits[: len(logits)].copy_(logits)

    def _token_ids(self, step: int, places: slice, sequences: int) -> Tensor:
        if step == 0:
            return self._inputs.rows[TOKEN, places]
        if step == 1:
            last = self._columns.index_select(0, self._inputs.sequences[LAST_ROW, :sequences])
        else:
            last = self._columns[self._inputs.places(step - 1, sequences)]
        return last if self._model.output_ids is None else self._model.output_ids[last]

    def _choose(self, logits: Tensor, sampler: RowSampler | None, places: slice) -> None:
        if sampler is None:
            self._largest[places], self._columns[places] = logits.max(dim=-1)  # a NaN is the largest
            return
        buffer = self._buffers[sampler]
        columns, buffer.outputs.device[places] = sampler.compute(logits, buffer.inputs.device[places])
        self._columns[places] = columns
        self._largest[places] = logits.gather(1, columns.unsqueeze(1)).squeeze(1)


def _shapes(rows: int, steps: int, sampler: RowSampler | None, sequences: int) -> list[PassShape]:
    return [PassShape(1 if step else rows, step, sampler, sequences) for step in range(steps)]
