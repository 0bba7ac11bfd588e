"""Passes computed anew each time, on a CPU: padded and cut by `numerics.py`, with `SplitAttention`.

Linear layers, norms and activations compute the rows of all sequences in one call, attention each sequence alone, over
its own region of the memory. At a fixed width a sequence's attention has the shapes that it has alone. How many rows
the rest may have without a change of bits is found out by computing (`RowCounts`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from amusd.models.attention import Attention, AttentionInputs
from amusd.models.kv_cache import KVMemory, PreallocatedCache
from amusd.models.language_model import ModelOutput
from amusd.models.numerics import Numerics
from amusd.models.passes import PADDING_ID, Network, Part, PartOutput, Pass
from amusd.models.split_attention import BLOCK, JoinedAttention, SplitAttention

_KEYS_STEP = 64
"""The keys of a tree are read up to a multiple of this, so that shapes repeat."""
_MOST_KEYS = 20 * BLOCK
"""Slots of a cache up to which attention of few rows is compared with that of many."""
_WIDTHS = (1, 2, 3, 4, 6, 8)
"""Numbers of rows of one call that may agree, in widths; the last is the most of any call."""
_TIMED_PASSES = 2
"""Passes by which the time of a number of rows is known; the quickest counts, as other work only slows them."""


class EagerPasses:
    """Runs a network over any caches. For one thread: each pass writes its token ids where the last one did."""

    def __init__(self, network: Network, numerics: Numerics, max_length: int, *, may_vary: bool) -> None:
        """`max_length`: positions that the model knows; `may_vary`: False if each call has `width` rows or a part's."""
        if numerics.fixed and numerics.border is not None and BLOCK % numerics.border:
            raise ValueError(f"border={numerics.border} must divide {BLOCK}, the block of attention on a CPU")
        self._network = network
        self._reads_features = network.feature_width > 0
        self._numerics = numerics
        self._row_counts = RowCounts(network, numerics.width, max_length, only_width=not may_vary)
        most = max(_WIDTHS[-1] * numerics.width, numerics.prefill_chunk)
        self._token_ids = torch.full((most,), PADDING_ID)
        self._token_ids_view = self._token_ids.numpy()  # written before each pass
        # Rows of padding may stand beyond the last position the model knows.
        self._positions = torch.arange(numerics.allocation(max_length)).clamp_(max=max_length - 1)

    def run(self, work: Pass) -> list[PartOutput]:
        """Compute a pass; returns the logits of each part, or nothing for a prompt."""
        outputs: dict[int, PartOutput] = {}
        with torch.inference_mode():
            for numbers in self._calls([len(part.token_ids) for part in work.parts]):
                parts = [work.parts[number] for number in numbers]
                logits = self._call(parts, with_logits=work.with_logits)
                if logits is not None:
                    each = torch.split(logits, [len(part.token_ids) for part in parts])
                    outputs |= {number: [ModelOutput(rows)] for number, rows in zip(numbers, each, strict=True)}
        return [outputs[number] for number in sorted(outputs)]

    def prepare(self, num_parts: int, cache: PreallocatedCache) -> None:
        """Find out now which numbers of rows passes of `num_parts` parts may have, over caches as `cache`."""
        if self._numerics.fixed:
            self._row_counts.up_to(num_parts * self._numerics.width)
            self._row_counts.quickest(1)
            self._row_counts.of_attention(1, cache)

    def _calls(self, row_counts: Sequence[int]) -> list[list[int]]:
        """The parts that share a call of the network: one call, or few with room for all their rows."""
        if len(row_counts) == 1:
            return [[0]]
        most = _WIDTHS[-1] * self._numerics.width
        if self._numerics.fixed:
            most = self._row_counts.up_to(sum(row_counts))[-1]
        calls: list[list[int]] = []
        for number in sorted(range(len(row_counts)), key=row_counts.__getitem__, reverse=True):
            for call in calls:
                if sum(row_counts[other] for other in call) + row_counts[number] <= most:
                    call.append(number)
                    break
            else:
                calls.append([number])
        return [sorted(call) for call in calls]

    def _call(self, parts: Sequence[Part], *, with_logits: bool) -> Tensor | None:
        """The logits [rows, vocab] of all parts, one after another; None for a prompt."""
        rows, memory = sum(len(part.token_ids) for part in parts), parts[0].cache.memory
        is_padded = self._numerics.fixed and with_logits
        computed = self._row_counts.quickest(rows) if is_padded else rows
        token_ids = self._token_ids[:computed]
        attention: Attention
        if len(parts) == 1 and parts[0].rows is None:
            cache = parts[0].cache
            self._token_ids_view[:rows] = parts[0].token_ids
            positions = self._positions[cache.length : cache.length + computed]
            memory.slots_of_pass = cache.memory_slots(rows)
            if self._reads_features:
                memory.parents_of_pass = (positions + (cache.first - 1)).clamp_(min=cache.first)
            attention = self._attention(parts[0], computed, with_logits=with_logits)
        else:
            places: list[int] = []
            slots: list[int] = []
            parents: list[int] = []
            packed: list[tuple[slice, SplitAttention]] = []
            for part in parts:
                first, cache = len(places), part.cache
                if part.rows is None:
                    places += range(cache.length, cache.length + len(part.token_ids))
                    slots += cache.memory_slots(len(part.token_ids))
                else:
                    places += part.rows.positions
                    parents += [cache.first + slot for slot in part.rows.parents]
                    slots += [cache.first + slot for slot in part.rows.slots]
                self._token_ids_view[first : len(places)] = part.token_ids
                num_rows = len(part.token_ids) if len(parts) > 1 else computed
                packed.append((slice(first, len(places)), self._attention(part, num_rows, with_logits=True)))
            positions = torch.tensor(places + [0] * (computed - rows))
            memory.slots_of_pass = torch.tensor(slots)
            if self._reads_features:
                memory.parents_of_pass = torch.tensor(parents + [0] * (computed - rows))
            attention = JoinedAttention(packed, computed) if len(parts) > 1 else packed[0][1]
        self._token_ids_view[rows:computed] = PADDING_ID
        several = len(parts) > 1
        logits = self._network(token_ids, positions, attention, memory, with_logits=with_logits, several=several)
        for part in parts:
            if part.rows is None:
                part.cache.advance(len(part.token_ids))
        return None if logits is None else logits[:rows]

    def _attention(self, part: Part, rows: int, *, with_logits: bool) -> SplitAttention:
        """The attention of one sequence, which has `rows` in the pass."""
        cache = part.cache
        if with_logits and self._numerics.fixed:
            rows = self._row_counts.of_attention(rows, cache)
        if part.rows is not None:
            # `fixed`: a function of the position alone
            num_keys = self._numerics.num_keys(len(part.rows.prefix), 1)
            if num_keys < part.rows.num_keys:
                num_keys = min(-(-part.rows.num_keys // _KEYS_STEP) * _KEYS_STEP, cache.allocated)
            visible = torch.from_numpy(part.rows.visible(num_keys, rows))
            return SplitAttention.of_paths(part.rows.num_shared, visible, cache.memory.dtype, cache.first)
        start, products = cache.length, cache.memory.dtype
        if with_logits:
            num_keys = self._numerics.num_keys(start, rows)
        else:
            num_keys = self._numerics.prefill_keys(start + rows)
            products = self._network.cache_dtype  # many rows are worth a conversion
        return SplitAttention.of_chain(start, rows, num_keys, products, cache.first)


class RowCounts:
    """The numbers of rows that agree: each row has the bits of a pass of `width` rows, at whatever place.

    They are found by computing, since they are a matter of the kernels of one machine: those of whole passes whose rows
    see themselves alone, and those of attention, which has the rows of one sequence.
    """

    def __init__(self, network: Network, width: int, max_length: int, *, only_width: bool) -> None:
        """`max_length`: positions that the model knows; `only_width`: compute nothing, other numbers are not wanted."""
        self._network = network
        self._width = width
        self._positions = torch.arange(width).clamp_(max=max_length - 1)
        self._token_ids = torch.arange(width) * max(1, network.num_ids // width) % network.num_ids
        self._agree = {width: True}
        self._expected: Tensor | None = None
        self._fewer: list[int] = []
        self._candidates = [width]
        if not only_width:
            # The bits of a part of a vector are too seldom others for a comparison to find them out.
            self._fewer = [*range(2, min(8, width), 2), *range(8, width, 4)] if network.fills_vectors else []
            self._candidates = [*self._fewer, *(width * number for number in _WIDTHS)]
        self._layers = _OwnValues()
        self._attention: list[int] | None = None
        self._seconds: dict[int, list[float]] = {}
        self._quickest: dict[int, int] = {}

    def quickest(self, rows: int) -> int:
        """The number that agrees, holds `rows` and takes the least time; the largest that agrees holds them.

        Up to `width` rows a pass reads all weights all the same, and kernels suit some numbers better: on a Zen 5 the
        products of 4 or 6 rows in bfloat16 take 0.83 of the time of those of 2. Beyond `width` it is the least number.
        """
        if rows not in self._quickest:
            fitting = [number for number in self.up_to(max(rows, self._width)) if number >= rows]
            has_choice = rows <= self._width and len(fitting) > 1
            self._quickest[rows] = min(fitting, key=self._time) if has_choice else fitting[0]
        return self._quickest[rows]

    def up_to(self, rows: int) -> list[int]:
        """The numbers that agree, up to the first that holds `rows`."""
        found = []
        for number in self._candidates:
            if self._agrees(number):
                found.append(number)
                if number >= rows:
                    break
        return found

    def of_attention(self, rows: int, cache: PreallocatedCache) -> int:
        """The least number of query rows that agrees and holds the `rows` of one sequence."""
        if cache.memory.dtype is not torch.float32 or cache.allocated > _MOST_KEYS:
            return self._width  # how keys are split depends on the number of rows
        if self._attention is None:
            self._attention = self._find_attention()
        return next((number for number in self._attention if number >= rows), self._width)

    def _time(self, number: int) -> float:
        """Seconds of a pass of `number` rows, the least of a few, those among them by which it was found to agree."""
        while len(self._seconds.get(number, ())) < _TIMED_PASSES:
            self._compute(torch.arange(number) % self._width)
        return min(self._seconds[number])

    def _agrees(self, number: int) -> bool:
        known = self._agree.get(number)
        if known is None:
            known = self._agree[number] = self._compare(number)
        return known

    def _compare(self, number: int) -> bool:
        """Whether passes of `number` rows, which show each of some tokens to itself alone, give the bits of `width`."""
        if self._expected is None:
            self._expected = self._compute(torch.arange(self._width))
        return all(torch.equal(self._compute(tokens), self._expected[tokens]) for tokens in self._choices(number))

    def _choices(self, number: int) -> list[Tensor]:
        """Which of `width` rows stand in passes of `number`: each at least once, as other sums may be rounded alike."""
        if number > self._width:
            return [torch.arange(number) % self._width]
        starts = [min(start, self._width - number) for start in range(0, self._width, number)]
        return [torch.arange(start, start + number) for start in starts]

    def _compute(self, tokens: Tensor) -> Tensor:
        """The logits [rows, vocab] of these of the tokens, each alone."""
        memory = KVMemory(len(tokens), self._network.cache_dtype)
        memory.slots_of_pass = range(len(tokens))
        memory.parents_of_pass = torch.zeros(len(tokens), dtype=torch.int64)
        positions, token_ids = self._positions[tokens], self._token_ids[tokens]
        start = time.perf_counter()
        with torch.inference_mode():
            logits = self._network(token_ids, positions, self._layers, memory, with_logits=True)
        self._seconds.setdefault(len(tokens), []).append(time.perf_counter() - start)
        assert logits is not None
        return logits

    def _find_attention(self) -> list[int]:
        """The numbers whose rows of attention have the bits of `width`, whatever the number of keys, to random keys."""
        if self._fewer and self._expected is None:
            self._expected = self._compute(torch.arange(self._width))  # which shows the shapes of the layers
        agreeing = self._fewer if len(self._layers.shapes) == 1 else []
        for shape, end in itertools.product(self._layers.shapes, range(BLOCK, _MOST_KEYS + 1, BLOCK)):
            agreeing = [] if shape is None else self._agreeing_at(agreeing, end, *shape)
        return agreeing

    def _agreeing_at(
        self, numbers: list[int], end: int, heads: int, key_heads: int, dim: int, scaling: float
    ) -> list[int]:
        """Those of `numbers` that agree over `end` keys."""
        generator = torch.Generator().manual_seed(end)
        keys, values = torch.randn(2, key_heads, end, dim, generator=generator)
        query = torch.randn(self._width, heads, dim, generator=generator)

        def attend(rows: int) -> Tensor:
            attention = SplitAttention.of_chain(end - self._width, rows, end, torch.float32)
            return attention.attend(AttentionInputs(query[:rows], keys, values, scaling))

        expected = attend(self._width)
        return [number for number in numbers if torch.equal(attend(number), expected[:number])]


class _OwnValues:
    """Attention of rows that see nothing but themselves; notes the shapes of the layers."""

    def __init__(self) -> None:
        self.shapes: set[tuple[int, int, int, float] | None] = set()
        """Query heads, key heads, their width, and the factor of scores; None for a layer that has more to it."""

    def attend(self, layer: AttentionInputs) -> Tensor:
        """See `Attention`. The memory has as many slots as there are rows."""
        heads, (key_heads, _, dim) = layer.query.shape[1], layer.keys.shape
        is_usual = layer.is_plain and layer.values.shape[2] == dim
        self.shapes.add((heads, key_heads, dim, layer.scaling) if is_usual else None)
        return layer.values.transpose(0, 1).repeat_interleave(heads // key_heads, dim=1)
