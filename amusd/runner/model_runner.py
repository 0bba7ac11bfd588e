"""A causal language model on one device. It knows no candidates and no messages.

The steps of a forward pass, in order:

    ModelRunner.run       checks each sequence's `Rows`, and gives the rows of paths their slots
    Ranks.announce        tells the other ranks to compute the same pass (`runtime/ranks.py`)
    EagerPasses.run       on a CPU, or for recurrent models: joins and pads the rows, and masks what a row must not see
    CapturedPasses.run    on a GPU: copies the rows to fixed addresses, and replays a graph, which also samples
    Network               computes logits: each layer writes keys and values to `KVMemory`, then calls `Attention`
    ModelOutput           holds one sequence's logits, and the columns that a graph sampled
    KVCache.advance       counts the rows of a chain; after paths, `ModelRunner.keep` says which rows count
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from amusd.errors import ConfigError, DeviceError, PeerError, RankLostError
from amusd.models.kv_cache import KVCache, KVMemory
from amusd.models.network import Network
from amusd.models.passes import Forward, Keep, ModelOutput, Prefill, Prepare, RankCommand, Rows, Wipe, lay_out
from amusd.models.recurrent import StateHistory, StateShelf
from amusd.runner.captured import CapturedPasses
from amusd.runner.eager import EagerPasses
from amusd.runner.fallback import find_way
from amusd.runner.graphs import fetch, wait_for
from amusd.runner.load_options import LoadOptions
from amusd.sampling.sampler import RowSampler, SamplingState, send


@dataclass(eq=False, repr=False)
class ModelRunner:
    """A network under a rule for its passes, made by `load_model`. For one thread."""

    network: Network
    options: LoadOptions
    max_length: int
    output_ids: Tensor | None = None
    """[vocab_size] int64: token of each column of the logits; None: the column itself."""

    def __post_init__(self) -> None:
        network, options = self.network, self.options
        if self.output_ids is not None:
            self.output_ids = self.output_ids.to(network.device)
        self.numerics, self.capture = options.numerics, options.capture
        self.tokens_per_step, self.ranks = options.tokens_per_step, options.ranks
        self._shelf = StateShelf(options.state_bytes)
        if network.is_recurrent:  # unpadded chains, one per sequence: a graph cannot hold their shapes
            self.numerics = replace(self.numerics, fixed=False, num_tracks=1)
            self.capture, self.tokens_per_step = None, 1
        self.implementation, self.device = network.implementation, network.device
        self.vocab_size, self.num_ids = network.vocab_size, network.num_ids
        self.weight_bytes, self.feature_width = network.weight_bytes, network.feature_width
        self.feature_columns: Mapping[str, slice] = {} if network.taps is None else network.taps.columns
        self._sampling: WeakKeyDictionary[KVMemory, SamplingState] = WeakKeyDictionary()
        self._is_prepared = False
        self._eager = None
        if self.capture is None:
            # With several ranks the rounding of a sum may depend on the row's place.
            copied, is_alone = self.fetch if self.device.type == "cuda" else Tensor.cpu, self.ranks.size == 1
            self._eager = EagerPasses(network, self.numerics, self.max_length, copied, varies=is_alone)

    def new_cache(self, capacity: int, *, spare: int = 0) -> KVCache:
        """A single cache; see `new_caches`."""
        return self.new_caches(1, capacity, spare=spare)[0]

    def new_caches(self, num_caches: int, capacity: int, *, spare: int = 0) -> list[KVCache]:
        """Empty caches in one shared memory, each for a sequence of at most `capacity` tokens.

        `spare`: slots for nodes of a tree. Raises `ValueError` beyond `max_length`.
        """
        if not 1 <= capacity <= self.max_length:
            raise ValueError(f"a cache of {capacity} tokens: must be between 1 and {self.max_length}")
        allocated = self.numerics.allocation(capacity + spare)
        if self.capture is not None:
            allocated += self.numerics.width + self.tokens_per_step  # the last ones for padding
        memory = KVMemory(num_caches * allocated, self.network.cache_dtype)
        caches = [
            KVCache(memory, capacity=capacity, allocated=allocated, spare=spare, number=index)
            for index in range(num_caches)
        ]
        for cache in caches if self.network.is_recurrent else ():
            cache.history = StateHistory(self._shelf)
        if self.capture is not None:
            passes = CapturedPasses(self, caches)
            for cache in caches:
                cache.captured = passes
        return caches

    def cache_bytes(self, num_caches: int) -> int:
        """Bytes of `num_caches` caches of `max_length`. Computes a pass, since only a pass shows the shapes."""
        cache = self.new_cache(1)
        self.prefill((0,), cache)
        states = 0 if cache.history is None else 2 * cache.history.state_bytes
        return num_caches * (states + self.max_length * cache.memory.nbytes // cache.memory.num_slots)

    def prepare(self, cache: KVCache, samplers: Sequence[RowSampler] = (), steps: int = 1) -> None:
        """Do slow first-time work for passes over the memory of `cache`, with these samplers and up to `steps` steps.

        Afterwards other captured shapes raise `DeviceError`. The first call on a single rank's GPU runs `find_way`.
        """
        if self.capture is not None and not self._is_prepared:
            if self.device.type == "cuda" and self.ranks.size == 1:
                find_way(self, cache)
            self.prefill([0] * min(self.numerics.prefill_chunk, cache.capacity), cache)  # loads the kernels of prompts
            cache.truncate(0)
            self._is_prepared = True
        for sampler in (None, *samplers):
            self.compute(Prepare(cache, steps, self.options.dtype), sampler)

    def prefill(self, token_ids: Sequence[int], cache: KVCache) -> None:
        """Take in tokens without logits, in chunks whose borders depend on the position alone."""
        token_ids = [*cache.go_back(), *token_ids]
        end = cache.length + len(token_ids)
        done = 0
        while (start := cache.length) < end:
            count = self.numerics.prefill_end(start, end) - start
            self.compute(Prefill(cache, token_ids[done : done + count]))
            done += count

    def run(self, batch: Sequence[Rows], steps: int = 1) -> list[ModelOutput]:
        """One pass over rows of several sequences, whose caches share one memory.

        A chain has 1 to `numerics.max_rows(cache.length)` tokens, by which `cache.length` grows. Each further step
        takes in the token chosen by the step before, while the cache has room; the last token is not taken in. Paths
        have up to `numerics.width` rows on `numerics.tracks_at(cache.length)` tracks; the length stays until `keep`.
        Trees have up to `numerics.width` nodes; the length stays.

        A row's logits are those of its path alone. Raises `ValueError`, before any change, for rows that do not fit.
        """
        if not 1 <= steps <= self.tokens_per_step:
            raise ValueError(f"{steps} steps: must be between 1 and {self.tokens_per_step}")
        samplers = [rows.wanted.sampler for rows in batch if rows.wanted is not None]
        sampler = max(samplers, key=lambda sampler: sampler.level, default=None)
        return self.compute(Forward(batch, steps), sampler) if batch else []

    def keep(self, rows: Sequence[int], cache: KVCache) -> None:
        """Continue with `rows` of the last pass, a path from the first row; moves `cache.length`.

        Raises `ValueError` unless the last pass over `cache` had `parents`.
        """
        self.compute(Keep(cache, rows))

    def wipe(self, cache: KVCache) -> None:
        """Write zeros beyond the length of `cache`, after a pass with non-finite values."""
        self.compute(Wipe(cache))

    def compute(self, work: RankCommand, sampler: RowSampler | None = None) -> list[ModelOutput]:
        """Run a command. Rank 0 announces the command, and each follower calls this method with it.

        `sampler`: serves every sequence; None: the most likely tokens.
        """
        batch = [self._laid_out(rows) for rows in work.rows] if isinstance(work, Forward) else []
        try:
            self.ranks.announce(work, None if sampler is None else sampler.level)
            return self._compute(work, batch, sampler)
        except BaseException as error:
            if self.ranks.rank == 0 and not isinstance(error, PeerError):  # after a `PeerError` the ranks know
                self.ranks.abort()  # pending exchanges would mix with the next pass
            raise

    def _compute(self, work: RankCommand, batch: Sequence[Rows], sampler: RowSampler | None) -> list[ModelOutput]:
        """`batch`: the laid-out rows of a `Forward`."""
        passes = self._eager or work.cache.captured
        match work:
            case Prepare(cache, steps, dtype):
                if dtype != (own := self.options.dtype):  # NCCL would mix bytes of both dtypes
                    said = f"{dtype} on rank 0, {own} on rank {self.ranks.rank}"
                    raise ConfigError(f"target.dtype=auto: {said}; allowed: the name of one dtype")
                passes.prepare(cache, steps, sampler)
            case Prefill(cache, token_ids):
                cache.put_in_order()
                passes.prefill(cache, token_ids)
                cache.advance(len(token_ids))
                if cache.history is not None:
                    cache.history.store()
            case Forward(_, steps):
                batch = [self._resumed(rows) for rows in batch]
                outputs: list[ModelOutput] = passes.run(batch, steps, sampler)
                for each in batch:
                    cache, paths = each.cache, each.paths
                    cache.path_slots = () if paths is None or each.parents is None else paths.slots
                    if paths is None:
                        cache.advance(min(len(each.token_ids) + steps - 1, cache.capacity - cache.length))
                return outputs
            case Keep(cache, rows):
                cache.keep(rows)
            case Wipe(cache):
                cache.memory.wipe(cache.first + torch.from_numpy(cache.slots[cache.length :]))
        return []

    def read_features(self, batch: Sequence[tuple[KVCache, range]]) -> Sequence[Tensor]:
        """Features [positions, width] of each range of positions, all drafters' side by side.

        bfloat16 on the host, in one copy from a GPU.
        """
        memory, device = batch[0][0].memory, self.device
        slots = [cache.first + cache.slots[positions.start : positions.stop] for cache, positions in batch]
        assert self.network.taps is not None
        with torch.inference_mode():
            stored = memory.features(self.network.taps.width, device)
            found = stored.index_select(0, send(torch.from_numpy(np.concatenate(slots)), device))
            on_host = self.fetch(found.to(torch.bfloat16))
        return torch.split(on_host, [len(part) for part in slots])

    def write_features(self, slots: Sequence[int], features: Tensor, cache: KVCache) -> None:
        """Write features [slots, width] for a network that reads them, without waiting."""
        places = send(cache.first + torch.tensor(slots), self.device)
        with torch.inference_mode():
            stored = cache.memory.features(features.shape[1], self.device)
            stored.index_copy_(0, places, send(features, self.device).to(stored.dtype))

    def sampling_state(self, cache: KVCache) -> tuple[SamplingState, int]:
        """The sampling state of all sequences of a memory, and the number of this cache's sequence."""
        memory = cache.memory
        if memory not in self._sampling:
            device = self.device if self._eager is None else "cpu"  # where logits are
            kind, number = (self.vocab_size, self.output_ids, device), memory.num_slots // cache.allocated
            most = self.numerics.width
            self._sampling[memory] = SamplingState(*kind, num_sequences=number, max_path=most, fetch=self.fetch)
        return self._sampling[memory], cache.number

    def fetch(self, found: Tensor) -> Tensor:
        """A copy on the host. Raises as `wait`."""
        return fetch(found, self.wait)

    def wait(self) -> None:
        """Wait for the device. Raises `DeviceError` after a deadline, `RankLostError` for several ranks."""
        ranks = self.ranks
        try:
            wait_for(self.device, ranks.check)
        except DeviceError as error:
            if ranks.size == 1:
                raise
            ranks.abort()
            raise RankLostError(f"a rank of the target is silent: {error}") from None
        if ranks.rank == 0:  # the other ranks use no results
            ranks.check()

    def _laid_out(self, rows: Rows) -> Rows:
        """`rows` with the slots of their paths. Raises `ValueError` for rows that no pass can hold."""
        cache, numerics, parents = rows.cache, self.numerics, rows.parents
        count, start = len(rows.token_ids), cache.length
        is_chain = parents is None and rows.paths is None
        most = min(numerics.max_rows(start), cache.capacity - start) if is_chain else numerics.width
        if not 1 <= count <= most:
            raise ValueError(f"{count} tokens at {start}: allowed are 1 to {most}")
        if cache.history is not None and not is_chain:
            raise ValueError("paths: recurrent layers take chains alone")
        if parents is None:
            return rows
        paths = lay_out(parents, cache, numerics)
        if (last := max(paths.positions)) >= min(cache.capacity, start + numerics.max_rows(start)):
            raise ValueError(f"a path to position {last} from {start}: allowed are {numerics.max_rows(start)} rows")
        return replace(rows, paths=paths)

    def _resumed(self, rows: Rows) -> Rows:
        """`rows`, after the earlier tokens that the newest recurrent state lacks."""
        if rows.cache.history is None:
            return rows
        again = rows.cache.go_back()
        if len(again) > self.numerics.width:
            self.prefill(again, rows.cache)
            again = []
        tokens, number = [*again, *rows.token_ids], len(again)
        return replace(rows, token_ids=tokens, num_again=number, num_final=number + rows.num_final)


def extend(model: ModelRunner, token_ids: Sequence[int], cache: KVCache, num_tokens: int) -> list[int]:
    """Take in `token_ids` and choose `num_tokens` tokens greedily; the last is not taken in."""
    chosen: list[int] = []
    while len(chosen) < num_tokens:
        pending, steps = chosen[-1:] or token_ids, min(model.tokens_per_step, num_tokens - len(chosen))
        [output] = model.run([Rows(pending, cache)], steps)
        columns = output.choose()[len(pending) - 1 :]
        chosen += model.sampling_state(cache)[0].ids[columns].tolist()
    return chosen
