"""Passes without capture: of all models on a CPU (`cpu_attention`), of recurrent models on any device.

Linear layers, norms and activations compute the rows of all sequences in one call. `row_counts.py` finds how many rows
may share a call without a change of bits. Attention computes each sequence alone, with `fixed` in shapes that do not
depend on other sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from amusd.models.attention import attend_to_chains
from amusd.models.cpu_attention import Part, cpu_attention, seen_by_chain
from amusd.models.kv_cache import KVCache, PassMemory
from amusd.models.network import Network
from amusd.models.numerics import Numerics
from amusd.models.passes import ModelOutput, Rows
from amusd.runner.pass_buffer import PADDING_ID, PARENT, POSITION, SLOT, TOKEN, write_rows
from amusd.runner.row_counts import WIDTHS, RowCounts
from amusd.sampling.sampler import RowSampler, send

_KEYS_STEP = 64
"""Keys of a tree are read up to a multiple of this, so that shapes repeat."""


class EagerPasses:
    """Passes over any caches, for one thread, since all passes share one buffer of inputs."""

    def __init__(
        self, network: Network, numerics: Numerics, max_length: int, fetch: Callable[[Tensor], Tensor], *, varies: bool
    ) -> None:
        """`max_length`: number of the model's positions; `fetch`: makes a copy on the host.

        `varies`: calls may have other numbers of rows than `width`.
        """
        self._network = network
        self._numerics = numerics
        self._fetch = fetch
        self._row_counts = RowCounts(network, numerics.width, max_length, only_width=not varies)
        most = max(WIDTHS[-1] * numerics.width, numerics.prefill_chunk)
        self._inputs = np.zeros((4, most), dtype=np.int64)  # see `write_rows`
        self._tensors = torch.from_numpy(self._inputs).unbind()

    def run(self, batch: Sequence[Rows], _steps: int, _sampler: RowSampler | None) -> list[ModelOutput]:
        """Compute a pass of one step; returns each sequence's output, from which the caller samples."""
        outputs: list[ModelOutput] = []
        with torch.inference_mode():
            for part in self._split(batch):
                logits = self._compute(part, with_logits=True)
                each = torch.split(logits, [len(rows.token_ids) for rows in part])
                outputs += [
                    ModelOutput(own[rows.num_again :], rows.wanted) for own, rows in zip(each, part, strict=True)
                ]
        return outputs

    def prefill(self, cache: KVCache, token_ids: Sequence[int]) -> None:
        """Take in a chunk of a prompt."""
        with torch.inference_mode():
            self._compute([Rows(token_ids, cache, num_final=len(token_ids))], with_logits=False)

    def prepare(self, cache: KVCache, _steps: int, _sampler: RowSampler | None) -> None:
        """Find which numbers of rows passes over `cache`'s memory may have."""
        if self._numerics.fixed:
            self._row_counts.up_to(cache.memory.num_slots // cache.allocated * self._numerics.width)
            self._row_counts.quickest(1)
            self._row_counts.of_attention(1, cache)

    def _split(self, batch: Sequence[Rows]) -> list[list[Rows]]:
        """The sequences of each call of the network."""
        if len(batch) == 1:
            return [[*batch]]
        most = WIDTHS[-1] * self._numerics.width
        if self._numerics.fixed:
            most = self._row_counts.up_to(sum(len(rows.token_ids) for rows in batch))[-1]
        calls: list[list[Rows]] = []
        num_free = 0
        for rows in batch:
            if len(rows.token_ids) > num_free:
                calls.append([])
                num_free = most
            calls[-1].append(rows)
            num_free -= len(rows.token_ids)
        return calls

    def _compute(self, batch: Sequence[Rows], *, with_logits: bool) -> Tensor:
        """Logits [rows, vocab] of all sequences in order; no rows for a prompt."""
        ends = [0, *itertools.accumulate(len(rows.token_ids) for rows in batch)]
        num_rows, is_alone = ends[-1], len(batch) == 1
        is_padded = self._numerics.fixed and with_logits
        computed = self._row_counts.quickest(num_rows) if is_padded else num_rows
        parts, states = [], []
        for rows, first, end in zip(batch, ends, ends[1:], strict=False):
            write_rows(self._inputs, first, rows)
            own = range(first, computed if is_alone else end)
            count = self._row_counts.of_attention(len(own), rows.cache) if is_padded else len(own)
            parts.append(Part(own, self._seen(rows, count), rows.cache.first))
            if (history := rows.cache.history) is not None:
                states.append(history.begin(first, rows.token_ids, rows.num_final))
        self._inputs[:, num_rows:computed] = PADDING_ID  # at position 0
        slots: range | Tensor = self._tensors[SLOT][:num_rows]
        if is_alone and batch[0].paths is None:  # neighbouring slots are written faster
            start = batch[0].cache.first + batch[0].cache.length
            slots = range(start, start + num_rows)
        token_ids, positions = self._tensors[TOKEN][:computed], self._tensors[POSITION][:computed]
        if (device := self._network.device).type == "cpu":
            attention = cpu_attention(parts, computed)
        else:
            attention = attend_to_chains([(rows.cache.length, len(rows.token_ids), rows.cache.first) for rows in batch])
            token_ids, positions = send(token_ids, device), send(positions, device)
            slots = send(self._tensors[SLOT][:num_rows], device)
        memory = PassMemory(batch[0].cache.memory, slots, self._tensors[PARENT][:computed], states)
        logits = self._network(token_ids, positions, attention, memory, with_logits=with_logits)
        logits = self._fetch(logits[:num_rows])
        for part in states:
            part.history.end(part)
        return logits

    def _seen(self, rows: Rows, count: int) -> Tensor:
        """`Part.seen` [count, keys] of one sequence."""
        cache, paths, numerics = rows.cache, rows.paths, self._numerics
        start = cache.length
        if paths is None:
            return seen_by_chain(start, count, numerics.num_keys(start, count))
        keys = numerics.num_keys(len(paths.prefix), 1)  # `fixed`: a function of the position alone
        if keys < paths.num_keys:
            keys = min(-(-paths.num_keys // _KEYS_STEP) * _KEYS_STEP, cache.allocated)
        return torch.from_numpy(paths.seen(keys, count))
