"""Passes of a few fixed shapes over one cache, captured once and replayed, so that a GPU never waits for the host.

The shape of a pass is its number of rows, the number of tokens it chooses one after another, and the digest of the
logits that comes to the host (none: the most likely tokens). Everything else is data on the device: the tokens, where
each row stands and what it sees (`attend_rows`). So a chain, a tree and several paths are one graph, a rollback changes
numbers only, and several draft steps fit in one replay, each reading the token that the one before it chose. The host
writes its inputs, replays, and waits for one event (docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from amusd.errors import DeviceError, RankLostError
from amusd.models.attention import CausalAttention, TableAttention
from amusd.models.graphs import Capture, Completion, Replay
from amusd.models.kv_cache import PreallocatedCache
from amusd.models.language_model import LogitsDigest, check_finite
from amusd.models.numerics import Numerics
from amusd.models.passes import Network, Pass, PathRows, Slots
from amusd.models.sharding import Ranks

_NO_POSITION = -1  # a padded row: it sees nothing


@dataclass(frozen=True, slots=True)
class PassShape:
    """The key of a captured pass."""

    rows: int
    """Computed side by side, with padding."""
    steps: int = 1
    """Tokens chosen one after another, the first behind the last real row."""
    digest: LogitsDigest | None = None
    """Computed of each row's logits; None: the most likely token alone."""


class _DigestBuffers:
    """Inputs and outputs of one digest, for each row and each step."""

    def __init__(self, digest: LogitsDigest, count: int, device: torch.device) -> None:
        is_pinned = device.type == "cuda"
        self._host_inputs = torch.zeros((count, digest.num_inputs), dtype=torch.int64, pin_memory=is_pinned)
        self.inputs = torch.zeros_like(self._host_inputs, device=device)
        self._host_outputs = torch.zeros((count, digest.num_outputs), dtype=torch.int32, pin_memory=is_pinned)
        self.outputs = torch.zeros_like(self._host_outputs, device=device)

    def send(self, inputs: npt.NDArray[np.int64], first: int) -> None:
        """Hand the inputs of the rows from `first` on to the device. Does not wait."""
        rows = slice(first, first + len(inputs))
        self._host_inputs.numpy()[rows] = inputs
        self.inputs[rows].copy_(self._host_inputs[rows], non_blocking=True)

    def fetch(self, rows: slice) -> None:
        """Have the device write these outputs to the host. Does not wait."""
        self._host_outputs[rows].copy_(self.outputs[rows], non_blocking=True)

    def read(self, rows: slice) -> npt.NDArray[np.int32]:
        """A copy of the outputs of a pass that is over."""
        outputs: npt.NDArray[np.int32] = self._host_outputs.numpy()[rows].copy()
        return outputs


class _Inputs:
    """The inputs that the host writes before a pass: one pinned buffer, sent in one copy.

    rows    tokens, positions, slots, and which path each row is on; behind them the positions and slots of the steps
    paths   the slots of each path from position `length` on; a chain needs none
    """

    def __init__(self, max_rows: int, max_steps: int, max_depth: int, device: torch.device) -> None:
        counts = (1, 1, max_rows, max_rows, max_rows + max_steps, max_rows + max_steps, max_rows * max_depth)
        self._host = torch.zeros(sum(counts), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.zeros_like(self._host, device=device)
        host = np.split(self._host.numpy(), np.cumsum(counts)[:-1])
        on_device = torch.split(self._device, list(counts))
        self.last_row, self.length, self.token_ids, self.row_paths, self.positions, self.slots, paths = host
        self.paths = paths.reshape(max_rows, max_depth)
        self._num_before_paths = sum(counts[:-1])
        self.device_last_row, self._lengths, self.device_token_ids, self._row_paths = on_device[:4]
        self.device_positions, self.device_slots = on_device[4:6]
        self._branches = on_device[6].view(1, max_rows, max_depth)

    def send(self, num_paths: int) -> None:
        """Hand everything to the device, and the slots of the first `num_paths` paths. Does not wait."""
        count = self._num_before_paths + num_paths * self.paths.shape[1]
        self._device[:count].copy_(self._host[:count], non_blocking=True)

    def attention(self, table: Tensor, rows: slice) -> TableAttention:
        """The attention of these rows, or steps. `table`: see `TableAttention`."""
        positions = self.device_positions[rows].unsqueeze(0)
        row_paths = self._row_paths[: positions.shape[1]].unsqueeze(0)
        return TableAttention(table, self._lengths, self._branches, row_paths, positions)


class CapturedPasses:
    """Runs a network over one cache in captured passes."""

    def __init__(
        self,
        network: Network,
        numerics: Numerics,
        cache: PreallocatedCache,
        *,
        max_length: int,
        max_steps: int,
        output_ids: Tensor | None,
        capture: Capture,
        ranks: Ranks,
    ) -> None:
        """`max_length`: positions that the model knows; `output_ids`: see `LanguageModel`; `ranks`: of the network."""
        self._network = network
        self._numerics = numerics
        self._cache = cache
        self._last_position = max_length - 1
        self._max_rows = max_rows = numerics.width
        self._max_steps = max_steps
        self._output_ids = output_ids
        self._capture = capture
        self._ranks = ranks
        self._passes: dict[PassShape, tuple[Replay, list[Tensor]]] = {}  # with the logits of each
        self._digests: dict[LogitsDigest, _DigestBuffers] = {}
        self._is_sealed = False
        device = network.device
        self._is_pinned = device.type == "cuda"
        self._inputs = _Inputs(max_rows, max_steps, max(max_rows, cache.spare), device)
        self._host_table = torch.arange(cache.allocated, pin_memory=self._is_pinned)
        self._table = self._host_table.to(device)
        # The tokens chosen, and the bits of the logit of each, as float64: both come to the host in one copy.
        self._host_results = torch.zeros((2, max_rows + max_steps), dtype=torch.int64, pin_memory=self._is_pinned)
        self._results = torch.zeros_like(self._host_results, device=device)
        self._chosen, self._largest = self._results[0], self._results[1].view(torch.float64)
        self._host_chosen, self._host_largest = self._host_results[0], self._host_results[1].view(torch.float64)
        self._completion = Completion(device)

    def run(self, work: Pass) -> list[Tensor]:
        """Compute a pass and wait for it.

        Returns logits [tokens, vocab], and [1, vocab] for each further step, valid until the next pass; nothing for a
        prompt in order. Of several steps the last token stays outside the cache, and so do those that do not fit,
        which are of no use.
        """
        count, start = len(work.token_ids), self._cache.length
        digest = None if work.wanted is None else work.wanted.digest
        if not count:
            for rows in self._numerics.row_counts:
                self.prepare(PassShape(rows, work.steps, digest))
            return []
        if not work.with_logits and self._cache.is_in_order(start + count):
            self._prefill(work.token_ids)
            return []
        shape = PassShape(self._numerics.padded_rows(count), work.steps, digest)
        if work.rows is None:
            self._send_chain(work.token_ids, shape)
        else:
            self._send_paths(work.token_ids, work.rows, shape)
        if work.wanted is not None:
            buffers, inputs = self._buffers(work.wanted.digest), work.wanted.inputs
            buffers.send(inputs[:count], 0)
            if work.steps > 1:
                buffers.send(inputs[count:], self._max_rows + 1)
        first, *others = self._replay(shape, count)
        if work.rows is None:
            self._cache.advance(min(count + work.steps - 1, self._cache.capacity - start))
        return [first[:count], *others]

    def _prefill(self, token_ids: Sequence[int]) -> None:
        """Take in a chunk of a prompt. Not captured: its shape is the prompt's."""
        start, rows = self._cache.length, len(token_ids)
        on_host = torch.tensor(token_ids, pin_memory=self._is_pinned)
        positions = torch.arange(start, start + rows, device=self._network.device)
        self._cache.begin(rows, start + rows, positions)
        with torch.inference_mode():
            self._network(
                on_host.to(self._network.device, non_blocking=True),
                positions,
                CausalAttention(start, rows),
                self._cache,
                with_logits=False,
            )
        self._cache.advance(rows)
        self._wait()

    def chosen(self, count: int) -> list[int]:
        """The token chosen behind each of the first `count` rows of the last pass, without a digest.

        Raises `NotFiniteError` where the largest logit is not a finite number.
        """
        check_finite(self._host_largest[:count].numpy())
        tokens: list[int] = self._host_chosen[:count].tolist()
        return tokens

    def chain(self, count: int, steps: int) -> list[int]:
        """The tokens that the last `extend` of `count` tokens chose, one after another."""
        return self._of_chain(self._host_chosen, count, steps)

    def check_chain(self, count: int, steps: int) -> None:
        """Raise `NotFiniteError` where `chain`, without a digest, chose a logit that is not finite."""
        check_finite(np.array(self._of_chain(self._host_largest, count, steps)))

    def _of_chain(self, results: Tensor, count: int, steps: int) -> list[Any]:
        values: list[Any] = results.tolist()
        return [values[count - 1], *values[self._max_rows + 1 : self._max_rows + steps]]

    def digested(self, digest: LogitsDigest, count: int, steps: int = 1) -> npt.NDArray[np.int32]:
        """[count + steps - 1, words]: the outputs of the last pass, for its rows, then for its further steps."""
        buffers = self._buffers(digest)
        of_steps = slice(self._max_rows + 1, self._max_rows + steps)
        return np.concatenate((buffers.read(slice(count)), buffers.read(of_steps)))

    def prepare(self, shape: PassShape) -> None:
        """Capture this shape now. The scratch slots at the end of memory are overwritten, nothing else.

        From then on each pass must be of a prepared shape, so that no answer waits for a capture.
        """
        self._is_sealed = False
        self._write_rows((), (), (), shape.rows)
        self._inputs.positions[self._max_rows :] = _NO_POSITION
        self._inputs.slots[self._max_rows :] = self._scratch_slots(self._max_steps)
        self._inputs.send(0)
        self._captured(shape)
        self._is_sealed = True

    def _replay(self, shape: PassShape, count: int) -> list[Tensor]:
        """`count`: real rows, whose digests the host gets."""
        replay, logits = self._captured(shape)
        with torch.inference_mode():
            replay()
            if shape.digest is not None:
                buffers = self._buffers(shape.digest)
                buffers.fetch(slice(count))
                if shape.steps > 1:
                    buffers.fetch(slice(self._max_rows + 1, self._max_rows + shape.steps))
        self._wait()
        return logits

    def _wait(self) -> None:
        """Until the device is done. Raises `DeviceError` when it takes too long, `RankLostError` for several ranks."""
        try:
            self._completion.wait(self._ranks.check)
        except DeviceError as error:
            if self._ranks.size == 1:
                raise
            self._ranks.abort()
            raise RankLostError(f"a rank of the {self._ranks.role.value} is silent: {error}") from None
        if self._ranks.rank == 0:  # which alone uses the results
            self._ranks.check()

    # The inputs of a pass. The last replay is over, so nothing reads its inputs any more.

    def _send_chain(self, token_ids: Sequence[int], shape: PassShape) -> None:
        """Rows behind what the cache holds, and the single rows of further steps behind these."""
        inputs, start, slots = self._inputs, self._cache.length, self._cache.slots
        end, num_single = start + len(token_ids), shape.steps - 1
        inputs.length[0] = len(slots)  # all of a chain is read through the table
        self._write_rows(token_ids, range(start, end), slots[start:end], shape.rows)
        single = slice(self._max_rows + 1, self._max_rows + shape.steps)
        fitting = min(num_single, self._cache.capacity - end)
        inputs.positions[single] = np.minimum(np.arange(end, end + num_single), self._last_position)
        inputs.slots[single] = (*slots[end : end + fitting], *self._scratch_slots(num_single - fitting))
        self._send_table(slots[: end + num_single])
        inputs.send(0)

    def _write_rows(
        self, token_ids: Sequence[int], positions: Sequence[int], slots: Sequence[int] | Slots, rows: int
    ) -> None:
        """The rows of a pass, padded to `rows`. Padded rows see nothing and write to scratch slots."""
        inputs, count = self._inputs, len(token_ids)
        inputs.last_row[0] = max(count - 1, 0)
        inputs.token_ids[:count], inputs.token_ids[count:rows] = token_ids, 0
        inputs.positions[:count], inputs.positions[count:rows] = positions, _NO_POSITION
        inputs.slots[:count], inputs.slots[count:rows] = slots, self._scratch_slots(rows - count)

    def _send_paths(self, token_ids: Sequence[int], where: PathRows, shape: PassShape) -> None:
        """Rows on paths behind a prefix. A row that is followed by one other row shares its path."""
        inputs = self._inputs
        path_of: dict[tuple[int, ...], int] = {}
        num_paths = 0
        for row in sorted(range(len(where.paths)), key=lambda row: len(where.paths[row])):
            slots = tuple(where.paths[row])
            path = path_of.pop(slots[:-1], None)
            if path is None:
                path, num_paths = num_paths, num_paths + 1
            path_of[slots] = path
            inputs.row_paths[row] = path
            inputs.paths[path, : len(slots)] = slots
        inputs.row_paths[len(where.paths) :] = 0
        inputs.length[0] = len(where.prefix)
        self._write_rows(token_ids, where.positions, where.slots, shape.rows)
        self._send_table(where.prefix)
        inputs.send(num_paths)

    def _send_table(self, slots: Slots) -> None:
        """Tell the device the slots of the first positions, as far as it does not know them."""
        known = self._host_table.numpy()[: len(slots)]
        changed = np.flatnonzero(known != slots)
        if len(changed):
            first, end = int(changed[0]), int(changed[-1]) + 1
            known[first:end] = slots[first:end]
            self._table[first:end].copy_(self._host_table[first:end], non_blocking=True)

    def _scratch_slots(self, count: int) -> range:
        """The last slots of memory, which no token has."""
        return range(self._cache.allocated - count, self._cache.allocated)

    def _buffers(self, digest: LogitsDigest) -> _DigestBuffers:
        if digest not in self._digests:
            self._digests[digest] = _DigestBuffers(digest, self._max_rows + self._max_steps, self._network.device)
        return self._digests[digest]

    # The work of a replay.

    def _captured(self, shape: PassShape) -> tuple[Replay, list[Tensor]]:
        known = self._passes.get(shape)
        if known is None:
            if self._is_sealed:
                raise DeviceError(f"a pass was not prepared: {shape}")
            logits: list[Tensor] = []
            if shape.digest is not None:
                self._buffers(shape.digest)  # memory on the host cannot be had in a capture

            def work() -> None:
                logits[:] = self._compute(shape)

            with torch.inference_mode():
                known = self._passes[shape] = (self._capture(work), logits)
        return known

    def _compute(self, shape: PassShape) -> list[Tensor]:
        """The rows, then single ones for further steps; returns the logits of both."""
        inputs = self._inputs
        rows, end = slice(shape.rows), self._max_rows + shape.steps
        logits = [self._run(inputs.device_token_ids[rows], rows)]
        self._choose(logits[0], shape.digest, rows)
        last = self._chosen.index_select(0, inputs.device_last_row)  # [1]
        for step in range(self._max_rows + 1, end):
            row = slice(step, step + 1)
            logits.append(self._run(last, row))
            self._choose(logits[-1], shape.digest, row)
            last = self._chosen[row]
        self._host_results.copy_(self._results, non_blocking=True)
        return logits

    def _run(self, token_ids: Tensor, rows: slice) -> Tensor:
        inputs = self._inputs
        self._cache.begin(len(token_ids), self._cache.allocated, inputs.device_slots[rows])
        attention = inputs.attention(self._table.unsqueeze(0), rows)
        positions = inputs.device_positions[rows].clamp(min=0)
        logits = self._network(token_ids, positions, attention, self._cache, with_logits=True)
        assert logits is not None
        return logits

    def _choose(self, logits: Tensor, digest: LogitsDigest | None, rows: slice) -> None:
        """The token behind each row, and what the host wants to know of it."""
        if digest is None:
            self._largest[rows], columns = logits.max(dim=-1)  # a NaN is the largest
        else:
            buffers = self._buffers(digest)
            columns, buffers.outputs[rows] = digest.compute(logits, buffers.inputs[rows])
        self._chosen[rows] = columns if self._output_ids is None else self._output_ids[columns]
