"""Measures how many rows a CPU may compute at once without a change of bits."""

from __future__ import annotations

import functools
import time

import torch
from torch import Tensor

from amusd.models.attention import AttentionInputs
from amusd.models.cpu_attention import Part, cpu_attention, seen_by_chain
from amusd.models.kv_cache import KVCache, KVMemory, PassMemory
from amusd.models.network import Network
from amusd.models.numerics import PROMPT_STEP

WIDTHS = (1, 2, 3, 4, 6, 8)
"""Numbers of rows per call to try, as multiples of `width`."""
_MOST_KEYS = 20 * PROMPT_STEP
_TIMED_PASSES = 2


class RowCounts:
    """Numbers of rows per call at which every row has the bits of a pass of `width` rows."""

    def __init__(self, network: Network, width: int, max_length: int, *, only_width: bool) -> None:
        """`max_length`: number of the model's positions; `only_width`: try no other row counts."""
        self._network = network
        self._width = width
        self._positions = torch.arange(width).clamp_(max=max_length - 1)
        self._token_ids = torch.arange(width) * max(1, network.num_ids // width) % network.num_ids
        self._fewer: list[int] = []
        self._candidates = [width]
        if not only_width:
            # If rows end inside a vector, bits differ too rarely for the comparison to detect.
            self._fewer = [*range(2, min(8, width), 2), *range(8, width, 4)] if network.attention_shape else []
            self._candidates = [*self._fewer, *(width * number for number in WIDTHS)]
        self._seconds: dict[int, list[float]] = {}
        self._agrees = functools.cache(self._compare)
        self.quickest = functools.cache(self._find_quickest)

    def up_to(self, rows: int) -> list[int]:
        """Agreeing row counts, up to the first of at least `rows`."""
        found = []
        for number in self._candidates:
            if self._agrees(number):
                found.append(number)
                if number >= rows:
                    break
        return found

    def of_attention(self, rows: int, cache: KVCache) -> int:
        """Least agreeing number of query rows for one sequence's `rows`."""
        if cache.allocated > _MOST_KEYS:
            return self._width
        return next((number for number in self._agreeing_attention if number >= rows), self._width)

    def _find_quickest(self, rows: int) -> int:
        """The quickest agreeing number that is at least `rows`; one must exist.

        Up to `width` rows, kernels suit some numbers better: on a Zen 5, bfloat16 products of 4 or 6 rows take 0.83 of
        the time of 2. Beyond `width` the least number is taken.
        """
        fitting = [number for number in self.up_to(max(rows, self._width)) if number >= rows]
        return min(fitting, key=self._time) if rows <= self._width and len(fitting) > 1 else fitting[0]

    def _time(self, num_rows: int) -> float:
        while len(self._seconds.get(num_rows, ())) < _TIMED_PASSES:
            self._compute(torch.arange(num_rows) % self._width)
        return min(self._seconds[num_rows])

    def _compare(self, num_rows: int) -> bool:
        if num_rows == self._width:
            return True
        choices = [torch.arange(num_rows) % self._width]
        if num_rows < self._width:  # each row at least once: some sums may agree by chance
            starts = [min(start, self._width - num_rows) for start in range(0, self._width, num_rows)]
            choices = [torch.arange(start, start + num_rows) for start in starts]
        return all(torch.equal(self._compute(tokens), self._expected[tokens]) for tokens in choices)

    @functools.cached_property
    def _expected(self) -> Tensor:
        return self._compute(torch.arange(self._width))

    def _compute(self, tokens: Tensor) -> Tensor:
        """Logits [rows, vocab] of these tokens, each alone."""
        whole, parents = KVMemory(len(tokens), self._network.cache_dtype), torch.zeros(len(tokens), dtype=torch.int64)
        memory = PassMemory(whole, range(len(tokens)), parents)
        positions, token_ids = self._positions[tokens], self._token_ids[tokens]
        start = time.perf_counter()
        with torch.inference_mode():
            logits = self._network(token_ids, positions, _own_values, memory, with_logits=True)
        self._seconds.setdefault(len(tokens), []).append(time.perf_counter() - start)
        return logits

    @functools.cached_property
    def _agreeing_attention(self) -> list[int]:
        agreeing = self._fewer
        for end in range(PROMPT_STEP, _MOST_KEYS + 1, PROMPT_STEP) if agreeing else ():
            assert self._network.attention_shape is not None
            heads, key_heads, dim = self._network.attention_shape
            generator = torch.Generator().manual_seed(end)
            keys, values = torch.randn(2, key_heads, end, dim, generator=generator)
            query = torch.randn(self._width, heads, dim, generator=generator)
            found = {}
            for rows in (*agreeing, self._width):
                attention = cpu_attention([Part(range(rows), seen_by_chain(end - self._width, rows, end), 0)], rows)
                found[rows] = attention(AttentionInputs(query[:rows], keys, values, dim**-0.5))
            agreeing = [rows for rows in agreeing if torch.equal(found[rows], found[self._width][:rows])]
        return agreeing


def _own_values(layer: AttentionInputs) -> Tensor:
    """An `Attention` of each row to itself alone."""
    return layer.values.transpose(0, 1).repeat_interleave(layer.query.shape[1] // len(layer.keys), dim=1)
