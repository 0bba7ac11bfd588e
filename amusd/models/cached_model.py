"""A `LanguageModel` made of a network and a rule for its passes.

It checks each pass, lays out its rows and tells the other ranks; `EagerPasses` and `CapturedPasses` compute it. Knows
nothing of candidates, sampling or messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from amusd.models.captured import CapturedPasses
from amusd.models.eager import EagerPasses
from amusd.models.graphs import Capture
from amusd.models.kv_cache import PreallocatedCache
from amusd.models.language_model import (
    Chooser,
    DigestRequest,
    KVCache,
    LogitsDigest,
    ModelOutput,
    SequenceRows,
    argmax_rows,
)
from amusd.models.numerics import Numerics
from amusd.models.passes import PADDING_ID, Network, Pass, PathRows, Slots, check_paths, lay_out_paths, lay_out_rows
from amusd.models.sharding import ALONE, Ranks
from amusd.models.split_attention import stored_dtype


@dataclass(frozen=True, slots=True)
class TreeRows:
    """The nodes of one tree in a pass: the arguments of `CachedModel.forward_tree`."""

    token_ids: Sequence[int]
    prefix: Slots
    paths: Sequence[Sequence[int]]
    cache: KVCache
    wanted: DigestRequest | None = None


@dataclass(frozen=True, slots=True)
class ChainRows:
    """The end of one chain that goes on: the arguments of `CachedModel.extend`."""

    token_ids: Sequence[int]
    cache: KVCache
    num_tokens: int
    chooser: Chooser | None = None


class _CapturedCache(PreallocatedCache):
    """A cache with the passes that were captured over its memory."""

    passes: CapturedPasses

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
        if tokens_per_step < 1:
            raise ValueError(f"tokens_per_step={tokens_per_step} must be at least 1")
        self._network = network
        self._numerics = numerics
        self._capture = capture
        self._ranks = ranks
        self._output_id_list = None if output_ids is None else output_ids.tolist()
        self.implementation = network.implementation
        """The forward pass's author: `amusd` or `transformers`."""
        self.device = network.device
        """Where the weights are."""
        self.captured_on = None if capture is None else network.device
        """The device whose passes are captured; None: each is computed anew, and logits are on the host."""
        self.max_length = max_length
        """Longest sequence, in tokens."""
        self.width = numerics.width
        """Most rows of one pass."""
        self.tokens_per_step = tokens_per_step
        """Tokens that `extend` makes in one replay."""
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
        if capture is None and network.device.type == "cuda":
            raise ValueError(f"passes on {network.device} need a capture: run_each_time where graphs are off")
        self._eager = EagerPasses(network, numerics, max_length) if capture is None else None

    def under(self, numerics: Numerics) -> CachedModel:
        """The same weights under another rule."""
        return CachedModel(
            self._network,
            numerics,
            max_length=self.max_length,
            output_ids=self.output_ids,
            capture=self._capture,
            tokens_per_step=self.tokens_per_step,
            ranks=self._ranks,
        )

    def new_cache(self, capacity: int, *, spare: int = 0) -> PreallocatedCache:
        """An empty cache for at most `capacity` tokens. Raises `ValueError` beyond `max_length`.

        `spare`: slots for nodes of a tree beside these tokens; see `forward_tree`.
        """
        if not 1 <= capacity <= self.max_length:
            raise ValueError(f"a cache of {capacity} tokens: must be between 1 and {self.max_length}")
        if spare < 0:
            raise ValueError(f"spare={spare} must be at least 0")
        dtype = self._network.cache_dtype
        allocated = self._numerics.allocation(capacity + spare)
        if self._capture is None:
            dtype = stored_dtype(dtype, self._numerics.allocation(self.max_length))  # not of this cache: bits follow
            return PreallocatedCache(capacity=capacity, allocated=allocated, dtype=dtype, spare=spare)
        allocated += self.tokens_per_step
        cache = _CapturedCache(capacity=capacity, allocated=allocated, dtype=dtype, spare=spare)
        cache.passes = CapturedPasses(
            self._network,
            self._numerics,
            cache,
            max_length=self.max_length,
            max_steps=self.tokens_per_step,
            output_ids=self.output_ids,
            capture=self._capture,
            ranks=self._ranks,
        )
        return cache

    def new_caches(self, number: int, capacity: int, *, spare: int = 0) -> list[PreallocatedCache]:
        """Empty caches that share their memory, each as of `new_cache`."""
        return [self.new_cache(capacity, spare=spare) for _ in range(number)]

    def prepare(self, cache: KVCache, digests: Sequence[LogitsDigest | None] = (None,), steps: int = 1) -> None:
        """See `LanguageModel`. A pass over a prepared cache that was not prepared is a `DeviceError`."""
        cache = self._checked((), cache)
        for digest in digests if isinstance(cache, _CapturedCache) else ():
            wanted = None if digest is None else DigestRequest(digest, np.zeros((0, digest.num_inputs), dtype=np.int64))
            self.run(Pass(steps=steps, wanted=wanted), cache)

    def chunk_end(self, start: int, end: int) -> int:
        """Where the chunk of a prompt ends that begins at position `start`, if the prompt ends at `end`."""
        return self._numerics.prefill_end(start, end)

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
            self.run(Pass(token_ids[done : done + rows], with_logits=False), cache)
            done += rows

    def forward(
        self,
        token_ids: Sequence[int],
        cache: KVCache,
        wanted: DigestRequest | None = None,
        parents: Sequence[int] | None = None,
    ) -> ModelOutput:
        """One pass over a chain, or over several paths; see `LanguageModel.forward`."""
        if parents is None:
            return self._output(Pass(token_ids, wanted=wanted), self._check_chain(token_ids, cache))
        cache = self._checked((), cache)
        rows = self._lay_out(token_ids, parents, cache)
        padding = [PADDING_ID] * (len(rows.paths) - len(token_ids))
        output = self._output(Pass([*token_ids, *padding], rows, wanted=wanted), cache)
        cache.path_slots = rows.slots
        return ModelOutput(output.logits[: len(token_ids)], output.digests)

    def forward_batch(self, batch: Sequence[SequenceRows]) -> list[ModelOutput]:
        """One pass over the rows of several sequences; see `LanguageModel.forward_batch`."""
        return [self.forward(rows.token_ids, rows.cache, rows.wanted, rows.parents) for rows in batch]

    def choose(self, token_ids: Sequence[int], cache: KVCache, parents: Sequence[int] | None = None) -> list[int]:
        """`forward`, and the most likely token after each of its tokens."""
        logits = self.forward(token_ids, cache, parents=parents).logits
        if isinstance(cache, _CapturedCache):
            return cache.passes.chosen(len(token_ids))
        return self._tokens(argmax_rows(logits))

    def keep(self, rows: Sequence[int], cache: KVCache) -> None:
        """Continue with `rows` of the last pass, which had several paths; see `LanguageModel.keep`."""
        cache = self._checked((), cache)
        cache.check_keep(rows)
        self._ranks.announce(cache, None, rows)
        cache.keep(rows)

    def extend(
        self, token_ids: Sequence[int], cache: KVCache, num_tokens: int, chooser: Chooser | None = None
    ) -> list[int]:
        """`num_tokens` tokens after `token_ids`, each chosen behind the one before; see `LanguageModel`."""
        if num_tokens < 1:
            raise ValueError(f"num_tokens={num_tokens} must be at least 1")
        end = cache.length + len(token_ids) + num_tokens - 1
        if end > cache.capacity:
            raise ValueError(f"{num_tokens} tokens do not fit: {end} of {cache.capacity} would be used")
        chosen: list[int] = []
        pending = token_ids
        while len(chosen) < num_tokens:
            chosen += self._step(pending, cache, chooser)
            pending = chosen[-1:]
        cache.truncate(end)
        return chosen[:num_tokens]

    def forward_tree(
        self,
        token_ids: Sequence[int],
        prefix: Slots,
        paths: Sequence[Sequence[int]],
        cache: KVCache,
        wanted: DigestRequest | None = None,
    ) -> ModelOutput:
        """One pass over 1 to `width` nodes of a tree. Logits that are captured are valid until the next pass.

        `prefix` [positions] int64: the slots of the tokens before the tree. `paths`: of each row, the slots that lead
        from there to it, its own last, where its keys and values go. An ancestor was computed before, or is a row of
        this pass.

        After `prefill` of n tokens, slots [0, n) are theirs. The others are the caller's, who may give a slot to
        another node at any time; `new_cache(capacity, spare=...)` has `capacity + spare` in all, and `spare` is the
        longest path. Low slots are cheap on a CPU. `cache.length` neither matters nor changes; `prefill` and `forward`
        write from there on, padding included, whatever lies there. Raises `ValueError`, before any change, for what no
        path can be.
        """
        cache = self._checked((), cache)
        if not 1 <= len(token_ids) <= self._numerics.width:
            raise ValueError(f"{len(token_ids)} rows: allowed are 1 to {self._numerics.width}")
        return self._output(Pass(token_ids, PathRows(prefix, paths), wanted=wanted), cache)

    def forward_trees(self, batch: Sequence[TreeRows]) -> list[ModelOutput]:
        """One pass over nodes of several trees, whose caches share their memory; each as of `forward_tree`."""
        return [self.forward_tree(rows.token_ids, rows.prefix, rows.paths, rows.cache, rows.wanted) for rows in batch]

    def extend_batch(self, batch: Sequence[ChainRows]) -> list[list[int]]:
        """`extend` of several sequences, whose caches share their memory, in as many passes as the longest needs."""
        return [self.extend(rows.token_ids, rows.cache, rows.num_tokens, rows.chooser) for rows in batch]

    def run(self, work: Pass, cache: PreallocatedCache) -> list[Tensor]:
        """Compute a pass on every rank; returns logits [tokens, vocab], and [1, vocab] for each further step.

        Checks the paths of `work` alone, unlike the calls above. Other ranks call it with what the first one announces.
        """
        if work.rows is not None:
            check_paths(self._network, work.token_ids, work.rows, max_length=self.max_length, num_slots=cache.allocated)
        self._ranks.announce(cache, work)
        cache.path_slots = ()
        if isinstance(cache, _CapturedCache):
            return cache.passes.run(work)
        assert self._eager is not None
        return self._eager.run(work, cache)

    def _output(self, work: Pass, cache: PreallocatedCache) -> ModelOutput:
        """The logits of a pass, and its digests."""
        logits = self.run(work, cache)[0]
        if work.wanted is None or not isinstance(cache, _CapturedCache):
            return ModelOutput(logits)
        return ModelOutput(logits, cache.passes.digested(work.wanted.digest, len(work.token_ids)))

    def _lay_out(self, token_ids: Sequence[int], parents: Sequence[int], cache: PreallocatedCache) -> PathRows:
        """The places of rows on several paths. Raises `ValueError` where there is no room."""
        start, num_tracks = cache.length, self.num_tracks(cache.length)
        if not len(parents) + 1 == len(token_ids) <= self.width:
            raise ValueError(f"{len(token_ids)} rows with {len(parents)} parents: allowed are 1 to {self.width} rows")
        if num_tracks < 2:
            raise ValueError(f"a pass over several paths has no room at position {start}")
        if isinstance(cache, _CapturedCache):
            rows = lay_out_rows(parents, cache.slots, start, num_tracks)
        else:
            rows = lay_out_paths(
                parents,
                start=start,
                num_rows=self._numerics.padded_rows(len(token_ids)),
                num_tracks=num_tracks,
                stride=self._numerics.track_stride,
            )
        last = max(rows.positions)
        if last >= min(cache.capacity, start + self.max_rows(start)):
            raise ValueError(f"a path to position {last} from {start}: allowed are {self.max_rows(start)} rows of one")
        return rows

    def _tokens(self, columns: list[int]) -> list[int]:
        return columns if self._output_id_list is None else [self._output_id_list[column] for column in columns]

    def _step(self, token_ids: Sequence[int], cache: KVCache, chooser: Chooser | None) -> list[int]:
        """One or, where they come in one replay, `tokens_per_step` tokens after `token_ids`."""
        if isinstance(cache, _CapturedCache):
            return self._replay_step(token_ids, cache, chooser)
        if chooser is None:
            return self.choose(token_ids, cache)[-1:]
        logits = self.forward(token_ids, cache).logits[-1:]
        return self._tokens(chooser.choose(logits, cache.length - 1, token_ids[-1:]))

    def _replay_step(self, token_ids: Sequence[int], cache: _CapturedCache, chooser: Chooser | None) -> list[int]:
        """The same in one replay. The tokens chosen on the device are valid as far as `chooser` agrees."""
        self._check_chain(token_ids, cache)
        start, count = cache.length, len(token_ids)
        digest = None if chooser is None else chooser.digest
        # Other ranks do not know the noise, so they cannot tell which token of a digest comes next.
        follows = chooser is None or (chooser.follows_digest and self._ranks.size == 1)
        steps = self.tokens_per_step if follows else 1
        wanted = None
        if chooser is not None and digest is not None:
            wanted = DigestRequest(digest, chooser.inputs(start, token_ids, steps))
        first, *others = self.run(Pass(token_ids, steps=steps, wanted=wanted), cache)
        if chooser is None:
            cache.passes.check_chain(count, steps)
            return cache.passes.chain(count, steps)
        before, end = token_ids[-1], start + count
        if digest is None:
            return self._tokens(chooser.choose(first[-1:], end - 1, [before]))
        outputs = cache.passes.digested(digest, count, steps)[count - 1 :]
        chosen: list[int] = []
        for step, (rows, followed) in enumerate(
            zip([first[-1:], *others], cache.passes.chain(count, steps), strict=True)
        ):
            [before] = self._tokens(chooser.choose(rows, end + step - 1, [before], outputs[step : step + 1]))
            chosen.append(before)
            if before != followed:  # what was computed behind it is of another sequence
                cache.truncate(min(cache.length, end + step))
                break
        return chosen

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
        num_ids = self._network.num_ids
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < num_ids:
            raise ValueError(f"token ids must be in [0, {num_ids}), not {min(token_ids)} to {max(token_ids)}")
        return cache
