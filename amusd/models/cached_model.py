"""A `LanguageModel` made of a network and a rule for its passes.

It checks each pass, lays out its rows and tells the other ranks; `EagerPasses` and `CapturedPasses` compute it. Knows
nothing of candidates, sampling or messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from amusd.models.captured import CapturedPasses
from amusd.models.eager import EagerPasses
from amusd.models.graphs import Capture, Completion, run_each_time, send
from amusd.models.kv_cache import KVMemory, PreallocatedCache
from amusd.models.language_model import (
    ChainRows,
    Chooser,
    FeatureRows,
    KVCache,
    ModelOutput,
    Sampler,
    SamplerRows,
    SequenceRows,
)
from amusd.models.numerics import Numerics
from amusd.models.passes import (
    Network,
    Part,
    PartOutput,
    Pass,
    PathRows,
    lay_out_paths,
    lay_out_rows,
)
from amusd.models.sharding import ALONE, Ranks
from amusd.models.split_attention import stored_dtype


class _CapturedCache(PreallocatedCache):
    """A cache that captured passes read through a table of its slots."""

    passes: CapturedPasses
    """Those over its memory, which all caches of that share."""

    def keep(self, rows: Sequence[int]) -> None:
        """See `PreallocatedCache`, but nothing moves: the positions change their slots."""
        self.check_keep(rows)
        for position, row in enumerate(rows, start=self.length):
            slot = self.path_slots[row]
            other = position + int((self.slots[position:] == slot).argmax())
            self.slots[[position, other]] = self.slots[[other, position]]
        self.advance(len(rows))


class CachedModel:
    """A network under a rule for its passes. `load_model` makes one. For one thread."""

    def __init__(
        self,
        network: Network,
        numerics: Numerics,
        *,
        max_length: int,
        output_ids: Tensor | None = None,
        capture: Capture | None = None,
        tokens_per_step: int = 1,
        ranks: Ranks = ALONE,
    ) -> None:
        """`max_length`: longest sequence in tokens; `output_ids`, `tokens_per_step`: see `LanguageModel`.

        `capture`: how passes of the few shapes that `numerics` leaves are captured, on a GPU; None: compute each anew,
        on a CPU. `ranks`: those that share `network`; they are told of each pass and of each capture. What they
        exchange must be fit for `capture`.
        """
        self._network = network
        self._numerics = numerics
        self._capture = capture
        self._ranks = ranks
        self._output_id_list = None if output_ids is None else output_ids.tolist()
        self.implementation = network.implementation
        """The forward pass's author: `amusd` or `transformers`."""
        self.device = network.device
        """The device of the weights."""
        self.captured_on = None if capture is None else network.device
        """The device whose passes are captured; None: each is computed anew, and logits are on the host."""
        self.max_length = max_length
        """Longest sequence, in tokens."""
        self.width = numerics.width
        """Most rows of one pass."""
        self.prefill_chunk = numerics.prefill_chunk
        """Prompt tokens of one pass at most; chunks end at its multiples."""
        self.tokens_per_step = tokens_per_step
        """Tokens that `extend_batch` makes at most before it waits for the device."""
        self.vocab_size = network.vocab_size
        """Columns of the logits."""
        self.output_ids = output_ids
        """[vocab_size] int64: column `j` of the logits scores token `output_ids[j]`; None: token `j`."""
        self.num_ids = network.num_ids
        """Token ids that it takes in: `[0, num_ids)`; a reduced head scores fewer."""
        self.weight_bytes = network.weight_bytes
        """Bytes of weights that one pass reads."""
        self.parameter_bytes = network.parameter_bytes
        """Bytes of all weights; tied ones count once."""
        self.feature_columns: Mapping[str, slice] = {} if network.taps is None else network.taps.columns
        """The columns of each drafter's feature, by its name; empty where nobody reads any."""
        self.feature_width = network.feature_width
        """Numbers of the feature that each of its rows starts from; 0: it reads none."""
        self._completion = Completion(network.device)
        self._eager = None
        if capture is None:
            # How the sums of ranks are rounded may depend on the place of a row.
            self._eager = EagerPasses(network, numerics, max_length, may_vary=ranks.size == 1)

    def under(self, numerics: Numerics) -> CachedModel:
        """The same weights under another rule."""
        return self._changed(numerics, self._capture)

    def uncaptured(self) -> CachedModel:
        """The same weights in passes that are launched each time, on a GPU."""
        return self._changed(self._numerics, run_each_time)

    def _changed(self, numerics: Numerics, capture: Capture | None) -> CachedModel:
        return CachedModel(
            self._network,
            numerics,
            max_length=self.max_length,
            output_ids=self.output_ids,
            capture=capture,
            tokens_per_step=self.tokens_per_step,
            ranks=self._ranks,
        )

    def new_cache(self, capacity: int, *, spare: int = 0) -> PreallocatedCache:
        """An empty cache for at most `capacity` tokens. Raises `ValueError` beyond `max_length`.

        `spare`: slots for nodes of a tree beside these tokens, as many as its longest path has; see `forward_trees`.
        """
        return self.new_caches(1, capacity, spare=spare)[0]

    def new_caches(self, number: int, capacity: int, *, spare: int = 0) -> list[PreallocatedCache]:
        """Empty caches that share their memory, each as of `new_cache`."""
        if not 1 <= capacity <= self.max_length:
            raise ValueError(f"a cache of {capacity} tokens: must be between 1 and {self.max_length}")
        dtype = self._network.cache_dtype
        sizes = {"capacity": capacity, "spare": spare, "allocated": self._numerics.allocation(capacity + spare)}
        if self._capture is None:
            dtype = stored_dtype(dtype, self._numerics.allocation(self.max_length))  # not of this cache: bits follow
            memory = KVMemory(number * sizes["allocated"], dtype)
            return [PreallocatedCache(memory, number=index, **sizes) for index in range(number)]
        sizes["allocated"] += self.tokens_per_step
        memory = KVMemory(number * sizes["allocated"], dtype)
        caches = [_CapturedCache(memory, number=index, **sizes) for index in range(number)]
        passes = CapturedPasses(
            self._network,
            self._numerics,
            caches,
            max_length=self.max_length,
            max_steps=self.tokens_per_step,
            output_ids=self.output_ids,
            capture=self._capture,
            ranks=self._ranks,
        )
        for cache in caches:
            cache.passes = passes
        return [*caches]

    def prepare(self, cache: KVCache, samplers: Sequence[Sampler] = (), steps: int = 1) -> None:
        """See `LanguageModel`, for the memory of `cache`. Then a captured pass of another shape is a `DeviceError`."""
        cache = self._checked((), cache)
        if self._eager is not None:
            self._eager.prepare(cache.memory.num_slots // cache.allocated, cache)
            return
        self.run(Pass([Part(cache)], steps=steps))
        for sampler in samplers:
            wanted = SamplerRows(sampler, np.zeros((0, sampler.num_inputs), dtype=np.int64))
            self.run(Pass([Part(cache, wanted=wanted)], steps=steps))

    def max_rows(self, start: int) -> int:
        """Most tokens of one path in a pass at position `start`."""
        return self._numerics.max_rows(start)

    def num_tracks(self, start: int) -> int:
        """Tracks of a pass at position `start`; 1: no room for a second path."""
        return self._numerics.tracks_at(start)

    def prefill(self, token_ids: Sequence[int], cache: KVCache) -> None:
        """Take in tokens whose logits nobody needs. Raises `ValueError` as `forward` does, before any change."""
        cache = self._checked(token_ids, cache)
        end = cache.length + len(token_ids)
        done = 0
        while (start := cache.length) < end:
            rows = self._numerics.prefill_end(start, end) - start
            if not cache.is_in_order(start + rows):  # a chunk needs positions that are their own slots
                rows = min(rows, self.max_rows(start))
            self.run(Pass([Part(cache, token_ids[done : done + rows])], with_logits=False))
            done += rows

    def forward(
        self,
        token_ids: Sequence[int],
        cache: KVCache,
        wanted: SamplerRows | None = None,
        parents: Sequence[int] | None = None,
    ) -> ModelOutput:
        """One pass over a chain, or over several paths; see `LanguageModel.forward`."""
        return self.forward_batch([SequenceRows(token_ids, cache, wanted, parents)])[0]

    def forward_batch(self, batch: Sequence[SequenceRows]) -> list[ModelOutput]:
        """One pass over the rows of several sequences; see `LanguageModel.forward_batch`."""
        parts = []
        for sequence in batch:
            rows, cache = None, self._checked((), sequence.cache)
            if sequence.parents is None:
                self._check_chain(sequence.token_ids, cache)
            else:
                rows = self._lay_out(sequence.token_ids, sequence.parents, cache)
            parts.append(Part(cache, sequence.token_ids, rows, sequence.wanted))
        outputs = [rows for rows, *_ in self.run(Pass(parts))] if parts else []
        for part in parts:
            if part.rows is not None:
                part.cache.path_slots = part.rows.slots
        return outputs

    def keep(self, rows: Sequence[int], cache: KVCache) -> None:
        """Continue with `rows` of the last pass, which had several paths; see `LanguageModel.keep`."""
        cache = self._checked((), cache)
        cache.check_keep(rows)
        self._ranks.announce([Part(cache)], None, rows)
        cache.keep(rows)

    def read_features(self, batch: Sequence[FeatureRows]) -> list[Tensor]:
        """Features of several sequences, bfloat16 [rows, width] on the host, in one copy; see `LanguageModel`."""
        caches = [self._checked((), rows.cache) for rows in batch]
        memory, device = caches[0].memory, self.device
        slots = [cache.first + cache.slots[rows.start : rows.end] for cache, rows in zip(caches, batch, strict=True)]
        assert self._network.taps is not None
        with torch.inference_mode():
            stored = memory.features(self._network.taps.width, device)
            found = stored.index_select(0, send(torch.from_numpy(np.concatenate(slots)), device))
            on_host = torch.empty(found.shape, dtype=torch.bfloat16, pin_memory=device.type == "cuda")
            on_host.copy_(found.to(torch.bfloat16), non_blocking=True)
        self._completion.wait(self._ranks.check)
        parts = torch.split(on_host, [len(part) for part in slots])
        return [part[:, rows.columns] for part, rows in zip(parts, batch, strict=True)]

    def write_features(self, slots: Sequence[int], features: Tensor, cache: KVCache) -> None:
        """Write features [slots, width] for a network that reads them. Does not wait."""
        cache = self._checked((), cache)
        places = send(cache.first + torch.tensor(slots), self.device)
        with torch.inference_mode():
            stored = cache.memory.features(features.shape[1], self.device)
            stored.index_copy_(0, places, send(features, self.device).to(stored.dtype))

    def extend(
        self, token_ids: Sequence[int], cache: KVCache, num_tokens: int, chooser: Chooser | None = None
    ) -> list[int]:
        """`extend_batch` of one sequence."""
        return self.extend_batch([ChainRows(token_ids, cache, num_tokens, chooser)])[0]

    def extend_batch(self, batch: Sequence[ChainRows]) -> list[list[int]]:
        """Tokens behind several chains, in as many passes as the longest needs; see `LanguageModel`."""
        ends = []
        for chain in batch:
            if chain.num_tokens < 1:
                raise ValueError(f"num_tokens={chain.num_tokens} must be at least 1")
            end, capacity = chain.cache.length + len(chain.token_ids) + chain.num_tokens - 1, chain.cache.capacity
            if end > capacity:
                raise ValueError(f"{chain.num_tokens} tokens do not fit: {end} of {capacity} would be used")
            self._check_chain(chain.token_ids, chain.cache)
            ends.append(end)
        chosen: list[list[int]] = [[] for _ in batch]
        while going := [index for index, chain in enumerate(batch) if len(chosen[index]) < chain.num_tokens]:
            pending = [_rest(batch[index], chosen[index]) for index in going]
            for index, tokens in zip(going, self._steps(pending), strict=True):
                chosen[index] += tokens
        for chain, end in zip(batch, ends, strict=True):
            chain.cache.truncate(end)
        return [tokens[: chain.num_tokens] for chain, tokens in zip(batch, chosen, strict=True)]

    def forward_trees(self, batch: Sequence[Part]) -> list[ModelOutput]:
        """One pass over the nodes of trees, 1 to `width` of each; the caches share their memory.

        After `prefill` of n tokens, slots [0, n) are theirs. The others are the caller's, who may give a slot to
        another node at any time. Low slots are cheap on a CPU.

        Logits that are captured are valid until the next pass. `cache.length` neither matters nor changes; `prefill`
        and `forward` write from there on, padding included, whatever lies there. Raises `ValueError`, before any
        change, for what no path can be.
        """
        for tree in batch:
            self._check_ids(tree.token_ids)
            if not 1 <= len(tree.token_ids) <= self._numerics.width:
                raise ValueError(f"{len(tree.token_ids)} rows: allowed are 1 to {self._numerics.width}")
        return [rows for rows, *_ in self.run(Pass(batch))] if batch else []

    def run(self, work: Pass) -> list[PartOutput]:
        """Compute a pass on every rank; returns what it gives for each part, or nothing for a prompt.

        Other ranks call it with what the first one announces. The caches share their memory, and each comes once.
        """
        first = work.parts[0].cache
        self._ranks.announce(work.parts, work)
        for part in work.parts:
            part.cache.path_slots = ()
        if isinstance(first, _CapturedCache):
            return first.passes.run(work)
        assert self._eager is not None
        return self._eager.run(work)

    def _lay_out(self, token_ids: Sequence[int], parents: Sequence[int], cache: PreallocatedCache) -> PathRows:
        """The places of rows on several paths. Raises `ValueError` where there is no room."""
        self._check_ids(token_ids)
        start, num_tracks = cache.length, self.num_tracks(cache.length)
        if not len(parents) + 1 == len(token_ids) <= self.width:
            raise ValueError(f"{len(token_ids)} rows with {len(parents)} parents: allowed are 1 to {self.width} rows")
        if num_tracks < 2:
            raise ValueError(f"a pass over several paths has no room at position {start}")
        if isinstance(cache, _CapturedCache):
            rows = lay_out_rows(parents, cache.slots, start, num_tracks)
        else:
            stride = self._numerics.track_stride
            rows = lay_out_paths(parents, start=start, num_tracks=num_tracks, stride=stride)
        last = max(rows.positions)
        if last >= min(cache.capacity, start + self.max_rows(start)):
            raise ValueError(f"a path to position {last} from {start}: allowed are {self.max_rows(start)} rows of one")
        return rows

    def _tokens(self, columns: list[int]) -> list[int]:
        return columns if self._output_id_list is None else [self._output_id_list[column] for column in columns]

    def _steps(self, chains: Sequence[ChainRows]) -> list[list[int]]:
        """One or, where passes are captured, up to `tokens_per_step` tokens behind each chain."""
        can_replay = self._eager is None and all(chain.chooser is None or chain.chooser.can_replay for chain in chains)
        steps = min(self.tokens_per_step, max(chain.num_tokens for chain in chains)) if can_replay else 1
        parts = []
        for chain in chains:
            cache, chooser = self._check_chain(chain.token_ids, chain.cache), chain.chooser
            wanted = None
            if chooser is not None:
                wanted = SamplerRows(chooser.sampler, chooser.rows(cache.length, chain.token_ids, num_steps=steps))
            parts.append(Part(cache, chain.token_ids, wanted=wanted))
        together = zip(chains, parts, self.run(Pass(parts, steps=steps)), strict=True)
        return [self._tokens(_columns(chain, part, output)) for chain, part, output in together]

    def _check_chain(self, token_ids: Sequence[int], cache: KVCache) -> PreallocatedCache:
        cache = self._checked(token_ids, cache)
        allowed = self.max_rows(cache.length)
        if not 1 <= len(token_ids) <= allowed:
            raise ValueError(f"{len(token_ids)} tokens at {cache.length}: allowed are 1 to {allowed}")
        return cache

    def _checked(self, token_ids: Sequence[int], cache: KVCache) -> PreallocatedCache:
        if not isinstance(cache, PreallocatedCache):
            raise TypeError(f"a cache of new_cache() is needed, not a {type(cache).__name__}")
        if cache.length + len(token_ids) > cache.capacity:
            raise ValueError(f"{len(token_ids)} tokens do not fit: {cache.length} of {cache.capacity} are used")
        self._check_ids(token_ids)
        return cache

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        num_ids = self._network.num_ids
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < num_ids:
            raise ValueError(f"token ids must be in [0, {num_ids}), not {min(token_ids)} to {max(token_ids)}")


def _columns(chain: ChainRows, part: Part, output: PartOutput) -> list[int]:
    """Those chosen behind the last row of a pass, and in each further step."""
    rows, *others = output
    if chain.chooser is not None and chain.chooser.draws:
        assert part.wanted is not None
        rows.sample(len(chain.token_ids) - 1, None)  # raises for what is no number
        return [chain.chooser.draw(rows.logits[-1:], part.wanted.inputs[-1:])]
    return [rows.sample(len(chain.token_ids) - 1, part.wanted)[0], *(step.sample(0, None)[0] for step in others)]


def _rest(chain: ChainRows, chosen: list[int]) -> ChainRows:
    """What is left of a chain behind the tokens that were chosen."""
    rest = chain.num_tokens - len(chosen)
    return replace(chain, token_ids=chosen[-1:] or chain.token_ids, num_tokens=rest)
