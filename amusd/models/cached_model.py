"""A `LanguageModel` made of a network and a rule for its passes: what is padded, cut, written and read.

Knows shapes, dtypes and devices; knows nothing of candidates, sampling or messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from amusd.models.argmax import argmax_rows
from amusd.models.captured import CapturedPasses, PassShape
from amusd.models.graphs import Capture
from amusd.models.kv_cache import PreallocatedCache
from amusd.models.language_model import Chooser, DigestRequest, KVCache, LogitsDigest, ModelOutput
from amusd.models.network import Network
from amusd.models.numerics import Numerics
from amusd.models.sharding import ALONE, Ranks, Work
from amusd.models.split_attention import BLOCK, SplitAttention, stored_dtype
from amusd.models.tree_pass import PathRows, Slots, check_paths, lay_out_paths, lay_out_rows

_PADDING_ID = 0  # any id will do: rows of padding are never read
_KEYS_STEP = 64
"""A CPU reads the keys of a tree up to a multiple of this, so that shapes repeat."""


class _CapturedCache(PreallocatedCache):
    """A cache together with the passes that were captured over its memory."""

    passes: CapturedPasses

    def keep(self, rows: Sequence[int]) -> None:
        """As of a `PreallocatedCache`, but nothing moves: the positions change their slots."""
        self.check_keep(rows)
        for position, row in enumerate(rows, start=self.length):
            slot = self.path_slots[row]
            other = position + int((self.slots[position:] == slot).argmax())
            self.slots[[position, other]] = self.slots[[other, position]]
        self.advance(len(rows))


class CachedModel:
    """A network with everything that a pass needs laid out beforehand. `load_model` makes one.

    For one thread: each pass writes its token ids where the last one did.
    """

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
        self._max_length = max_length
        self._capture = capture
        self._tokens_per_step = tokens_per_step
        self._ranks = ranks
        self._output_ids = output_ids
        self._digests: list[LogitsDigest] = []
        """Those that passes were prepared for; other ranks know them by their places, counted from 1."""
        self._output_id_list = None if output_ids is None else output_ids.tolist()
        if capture is not None:
            return
        if network.device.type == "cuda":
            raise ValueError(f"passes on {network.device} need a capture: run_each_time where graphs are off")
        if numerics.fixed and numerics.border is not None and BLOCK % numerics.border:
            raise ValueError(f"border={numerics.border} must divide {BLOCK}, the block of attention on a CPU")
        num_positions = numerics.allocation(max_length)
        self._token_ids = torch.full((max(numerics.width, numerics.prefill_chunk),), _PADDING_ID)
        self._token_ids_view = self._token_ids.numpy()  # written before each pass
        # Rows of padding may stand beyond the last position the model knows.
        self._positions = torch.arange(num_positions).clamp_(max=max_length - 1)

    @property
    def implementation(self) -> str:
        """Who wrote the forward pass: `amusd` or `transformers`."""
        return self._network.implementation

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self._network.vocab_size

    @property
    def num_ids(self) -> int:
        """Token ids that it takes in: `[0, num_ids)`; a reduced head scores fewer."""
        return self._network.num_ids

    @property
    def output_ids(self) -> Tensor | None:
        """[vocab_size] int64: column `j` of the logits scores token `output_ids[j]`; None: token `j`."""
        return self._output_ids

    @property
    def max_length(self) -> int:
        """Longest sequence, in tokens."""
        return self._max_length

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one pass reads."""
        return self._network.weight_bytes

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all weights; tied ones count once."""
        return self._network.parameter_bytes

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._network.device

    @property
    def captured_on(self) -> torch.device | None:
        """The device whose passes are captured; None: each is computed anew, and logits are on the host."""
        return None if self._capture is None else self._network.device

    def under(self, numerics: Numerics) -> CachedModel:
        """The same weights under another rule."""
        return CachedModel(
            self._network,
            numerics,
            max_length=self._max_length,
            output_ids=self._output_ids,
            capture=self._capture,
            tokens_per_step=self._tokens_per_step,
            ranks=self._ranks,
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens that `extend` makes in one replay."""
        return self._tokens_per_step

    def new_cache(self, capacity: int, *, spare: int = 0) -> PreallocatedCache:
        """An empty cache for at most `capacity` tokens. Raises `ValueError` beyond `max_length`.

        `spare`: slots for nodes of a tree beside these tokens; see `forward_tree`.
        """
        if not 1 <= capacity <= self._max_length:
            raise ValueError(f"a cache of {capacity} tokens: must be between 1 and {self._max_length}")
        if spare < 0:
            raise ValueError(f"spare={spare} must be at least 0")
        dtype = self._network.cache_dtype
        allocated = self._numerics.allocation(capacity + spare)
        if self._capture is None:
            dtype = stored_dtype(dtype, self._numerics.allocation(self._max_length))  # not of this cache: bits follow
            return PreallocatedCache(capacity=capacity, allocated=allocated, dtype=dtype, spare=spare)
        allocated += self._tokens_per_step
        cache = _CapturedCache(capacity=capacity, allocated=allocated, dtype=dtype, spare=spare)
        cache.passes = CapturedPasses(
            self._network,
            cache,
            max_length=self._max_length,
            max_rows=self._numerics.width,
            max_steps=self._tokens_per_step,
            output_ids=self._output_ids,
            capture=self._capture,
            ranks=self._ranks,
        )
        return cache

    def prepare(self, cache: KVCache, digests: Sequence[LogitsDigest | None] = (None,), steps: int = 1) -> None:
        """See `LanguageModel`. A pass over a prepared cache that was not prepared is a `DeviceError`."""
        cache = self._checked((), cache)
        if isinstance(cache, _CapturedCache):
            for digest in digests:
                self._announce(cache, Work(prepares=True, steps=steps), digest)
                for rows in self._numerics.row_counts:
                    cache.passes.prepare(PassShape(rows, steps, digest))

    def max_rows(self, start: int) -> int:
        """How many tokens one `forward` may carry at position `start`."""
        return self._numerics.max_rows(start)

    @property
    def width(self) -> int:
        """Rows of one pass at most."""
        return self._numerics.width

    def num_tracks(self, start: int) -> int:
        """Of a `forward_paths` at `start`; 1: it has no room. See `PathModel`."""
        return self._numerics.tracks_at(start)

    def prefill(self, token_ids: Sequence[int], cache: KVCache) -> None:
        """Take in tokens whose logits nobody needs. Raises `ValueError` as `forward` does, before any change."""
        cache = self._checked(token_ids, cache)
        end = cache.length + len(token_ids)
        done = 0
        while (start := cache.length) < end:
            rows = self._numerics.prefill_end(start, end) - start
            if not cache.is_in_order(start + rows):  # positions and slots differ, which chunks do not know
                rows = min(rows, self.max_rows(start))
            self._prefill(token_ids[done : done + rows], cache)
            done += rows

    def forward(self, token_ids: Sequence[int], cache: KVCache, wanted: DigestRequest | None = None) -> ModelOutput:
        """One pass over 1 to `max_rows(cache.length)` tokens; see `LanguageModel.forward`."""
        cache, computed, num_keys = self._plan(token_ids, cache)
        if not isinstance(cache, _CapturedCache):
            logits = self._run(token_ids, computed, num_keys, cache, with_logits=True)
            assert logits is not None
            return ModelOutput(logits[: len(token_ids)])
        self._announce(cache, Work(token_ids, with_logits=True), None if wanted is None else wanted.digest)
        if wanted is None:
            return ModelOutput(cache.passes.extend(token_ids, PassShape(computed))[0])
        logits = cache.passes.extend(token_ids, PassShape(computed, digest=wanted.digest), wanted.inputs)[0]
        return ModelOutput(logits, cache.passes.digested(wanted.digest, len(token_ids)))

    def choose(self, token_ids: Sequence[int], cache: KVCache) -> list[int]:
        """`forward`, and the most likely token after each of its tokens."""
        logits = self.forward(token_ids, cache).logits
        if isinstance(cache, _CapturedCache):
            return cache.passes.chosen(len(token_ids))
        return self._tokens(argmax_rows(logits))

    def forward_paths(
        self,
        token_ids: Sequence[int],
        parents: Sequence[int],
        cache: KVCache,
        wanted: DigestRequest | None = None,
    ) -> ModelOutput:
        """One pass over up to `width` tokens, which form several paths behind the first; see `PathModel`."""
        cache = self._checked((), cache)
        start = cache.length
        if not len(parents) + 1 == len(token_ids) <= self.width:
            raise ValueError(f"{len(token_ids)} rows with {len(parents)} parents: allowed are 1 to {self.width} rows")
        if self.num_tracks(start) < 2:
            raise ValueError(f"a pass over several paths has no room at position {start}")
        paths = self._lay_out_paths(parents, cache)
        last = max(paths.positions)
        if last >= min(cache.capacity, start + self.max_rows(start)):
            raise ValueError(f"a path to position {last} from {start}: allowed are {self.max_rows(start)} rows of one")
        padded = [*token_ids, *[_PADDING_ID] * (len(paths.paths) - len(token_ids))]
        output = self._compute_paths(padded, paths, cache, wanted)
        cache.path_slots = paths.slots
        return replace(output, logits=output.logits[: len(token_ids)])

    def choose_paths(self, token_ids: Sequence[int], parents: Sequence[int], cache: KVCache) -> list[int]:
        """`forward_paths`, and the most likely token after each of its tokens."""
        logits = self.forward_paths(token_ids, parents, cache).logits
        if isinstance(cache, _CapturedCache):
            return cache.passes.chosen(len(token_ids))
        return self._tokens(argmax_rows(logits))

    def keep(self, rows: Sequence[int], cache: KVCache) -> None:
        """Of the last `forward_paths`: go on with these rows, a path from the first; `cache.length` moves."""
        cache = self._checked((), cache)
        self._ranks.announce(cache, Work(kept=rows))
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
        return self._compute_paths(token_ids, PathRows(prefix, paths), cache, wanted)

    def _lay_out_paths(self, parents: Sequence[int], cache: PreallocatedCache) -> PathRows:
        """Where the rows of `forward_paths` stand."""
        start, num_tracks = cache.length, self.num_tracks(cache.length)
        if isinstance(cache, _CapturedCache):
            return lay_out_rows(parents, cache.slots, start, num_tracks)
        return lay_out_paths(
            parents,
            start=start,
            num_rows=self._numerics.padded_rows(len(parents) + 1),
            num_tracks=num_tracks,
            stride=self._numerics.track_stride,
        )

    def _compute_paths(
        self, token_ids: Sequence[int], where: PathRows, cache: PreallocatedCache, wanted: DigestRequest | None
    ) -> ModelOutput:
        check_paths(self._network, token_ids, where, max_length=self._max_length, num_slots=cache.allocated)
        self._announce(cache, Work(token_ids, with_logits=True, nodes=where), None if wanted is None else wanted.digest)
        cache.path_slots = ()
        if isinstance(cache, _CapturedCache):
            digest, inputs = (None, None) if wanted is None else (wanted.digest, wanted.inputs)
            shape = PassShape(self._padded_rows(len(token_ids)), digest=digest)
            logits = cache.passes.forward_paths(token_ids, where, shape, inputs)
            return ModelOutput(logits, None if digest is None else cache.passes.digested(digest, len(token_ids)))
        num_keys = self._numerics.num_keys(len(where.prefix), 1)  # `fixed`: a function of the position alone
        if num_keys < where.num_keys:
            num_keys = min(_rounded_up(where.num_keys), cache.allocated)
        cache.begin(len(token_ids), num_keys, torch.tensor(where.slots))
        with torch.inference_mode():
            computed = self._network(
                torch.tensor(token_ids),
                torch.tensor(where.positions),
                SplitAttention.of_paths(where.num_shared, torch.from_numpy(where.visible(num_keys)), cache.dtype),
                cache,
                with_logits=True,
            )
        assert computed is not None
        return ModelOutput(computed)

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
        """The same in one replay. What it chose on the device holds as far as `chooser` agrees."""
        cache, computed, _ = self._plan(token_ids, cache)
        passes, end = cache.passes, cache.length + len(token_ids)
        digest = None if chooser is None else chooser.digest
        # Other ranks do not know the noise, so they cannot tell which token of a digest comes next.
        follows = chooser is None or (chooser.follows_digest and self._ranks.size == 1)
        steps = self._tokens_per_step if follows else 1
        self._announce(cache, Work(token_ids, with_logits=True, steps=steps), digest)
        shape = PassShape(computed, steps, digest)
        if digest is None or chooser is None:
            logits = passes.extend(token_ids, shape)[0]
            if chooser is None:
                passes.check_chain(len(token_ids), steps)
                return passes.chain(len(token_ids), steps)
            return self._tokens(chooser.choose(logits[-1:], end - 1, token_ids[-1:]))
        inputs = chooser.inputs(cache.length, token_ids, steps)
        first, *others = passes.extend(token_ids, shape, inputs)
        outputs = passes.digested(digest, len(token_ids), steps)[len(token_ids) - 1 :]
        chosen: list[int] = []
        for step, (rows, followed) in enumerate(
            zip([first[-1:], *others], passes.chain(len(token_ids), steps), strict=True)
        ):
            before = [*token_ids[-1:], *chosen][-1:]
            chosen += self._tokens(chooser.choose(rows, end + step - 1, before, outputs[step : step + 1]))
            if chosen[-1] != followed:  # what was computed behind it is of another sequence
                cache.truncate(min(cache.length, end + step))
                break
        return chosen

    def _announce(self, cache: PreallocatedCache, work: Work, digest: LogitsDigest | None) -> None:
        """Tell the other ranks, if there are any, of work that ends with `digest`."""
        if digest is not None and digest not in self._digests:
            self._digests.append(digest)
        number = 0 if digest is None else 1 + self._digests.index(digest)
        self._ranks.announce(cache, replace(work, digest=number))

    def _plan(self, token_ids: Sequence[int], cache: KVCache) -> tuple[PreallocatedCache, int, int]:
        """Check a pass; returns the cache, the rows to compute and the keys to read."""
        cache = self._checked(token_ids, cache)
        rows, start = len(token_ids), cache.length
        if not 1 <= rows <= self._numerics.max_rows(start):
            raise ValueError(f"{rows} tokens at {start}: allowed are 1 to {self._numerics.max_rows(start)}")
        computed = self._padded_rows(rows)
        return cache, computed, self._numerics.num_keys(start, computed)

    def _padded_rows(self, rows: int) -> int:
        # On a CPU padding a bucketed pass buys nothing: no kernel is chosen or captured per shape.
        pads = self._numerics.fixed or self._capture is not None
        return self._numerics.padded_rows(rows) if pads else rows

    def _prefill(self, token_ids: Sequence[int], cache: PreallocatedCache) -> None:
        """One chunk of a prompt."""
        rows = len(token_ids)
        if not isinstance(cache, _CapturedCache):
            self._run(token_ids, rows, self._numerics.prefill_keys(cache.length + rows), cache, with_logits=False)
            return
        self._ranks.announce(cache, Work(token_ids))
        if cache.is_in_order(cache.length + rows):
            cache.passes.prefill(token_ids)
        else:
            cache.passes.extend(token_ids, PassShape(self._padded_rows(rows)))

    def _run(
        self, token_ids: Sequence[int], computed: int, num_keys: int, cache: PreallocatedCache, *, with_logits: bool
    ) -> Tensor | None:
        """Run the network over the tokens padded to `computed` rows, and move the cache by the real ones."""
        self._ranks.announce(cache, Work(token_ids, with_logits=with_logits))
        start, rows = cache.length, len(token_ids)
        products = cache.dtype if with_logits else self._network.cache_dtype  # many rows are worth a conversion
        self._token_ids_view[:rows] = token_ids
        self._token_ids_view[rows:computed] = _PADDING_ID
        cache.begin(computed, num_keys)
        with torch.inference_mode():
            logits = self._network(
                self._token_ids[:computed],
                self._positions[start : start + computed],
                SplitAttention.of_chain(start, computed, num_keys, products),
                cache,
                with_logits=with_logits,
            )
        cache.advance(rows)
        return logits

    def _checked(self, token_ids: Sequence[int], cache: KVCache) -> PreallocatedCache:
        if not isinstance(cache, PreallocatedCache):
            raise TypeError(f"a cache of new_cache() is needed, not a {type(cache).__name__}")
        if cache.length + len(token_ids) > cache.capacity:
            raise ValueError(f"{len(token_ids)} tokens do not fit: {cache.length} of {cache.capacity} are used")
        num_ids = self._network.num_ids
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < num_ids:
            raise ValueError(f"token ids must be in [0, {num_ids}), not {min(token_ids)} to {max(token_ids)}")
        return cache


def _rounded_up(num_keys: int) -> int:
    return -(-num_keys // _KEYS_STEP) * _KEYS_STEP
