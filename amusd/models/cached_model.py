"""A `LanguageModel` made of a network and a rule for its passes: what is padded, cut, written and read.

Knows shapes, dtypes and devices; knows nothing of candidates, sampling or messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amusd.models.argmax import argmax_rows
from amusd.models.attention import CausalMask
from amusd.models.kv_cache import PreallocatedCache
from amusd.models.language_model import KVCache, ModelOutput
from amusd.models.network import Network
from amusd.models.numerics import Numerics

_PADDING_ID = 0  # any id will do: rows of padding are never read


class CachedModel:
    """A network with everything that a pass needs laid out beforehand. `load_model` makes one."""

    def __init__(
        self, network: Network, numerics: Numerics, *, max_length: int, output_ids: Tensor | None = None
    ) -> None:
        """`max_length`: longest sequence in tokens; `output_ids`: see `LanguageModel.output_ids`."""
        self._network = network
        self._numerics = numerics
        self._max_length = max_length
        self._output_ids = output_ids
        self._output_id_list = None if output_ids is None else output_ids.tolist()
        # On a CPU padding a bucketed pass buys nothing: no kernel is chosen or captured per shape.
        self._pads = numerics.fixed or network.device.type != "cpu"
        num_positions = numerics.allocation(max_length)
        self._mask = CausalMask(
            max_rows=max(numerics.width, numerics.prefill_chunk),
            size=num_positions,
            groups=network.num_query_groups,
            dtype=network.cache_dtype,
            device=network.device,
        )
        # Rows of padding may stand beyond the last position the model knows.
        self._positions = torch.arange(num_positions, device=network.device).clamp_(max=max_length - 1)

    @property
    def implementation(self) -> str:
        """Who wrote the forward pass: `amusd` or `transformers`."""
        return self._network.implementation

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self._network.vocab_size

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

    def new_cache(self, capacity: int) -> PreallocatedCache:
        """An empty cache for at most `capacity` tokens. Raises `ValueError` beyond `max_length`."""
        if not 1 <= capacity <= self._max_length:
            raise ValueError(f"a cache of {capacity} tokens: must be between 1 and {self._max_length}")
        allocated = self._numerics.allocation(capacity)
        return PreallocatedCache(capacity=capacity, allocated=allocated, dtype=self._network.cache_dtype)

    def max_rows(self, start: int) -> int:
        """How many tokens one `forward` may carry at position `start`."""
        return self._numerics.max_rows(start)

    def prefill(self, token_ids: Sequence[int], cache: KVCache) -> None:
        """Take in tokens whose logits nobody needs. Raises `ValueError` as `forward` does, before any change."""
        cache = self._checked(token_ids, cache)
        end = cache.length + len(token_ids)
        done = 0
        while cache.length < end:
            start = cache.length
            rows = self._numerics.prefill_end(start, end) - start
            num_keys = self._numerics.prefill_keys(start + rows)
            self._run(token_ids[done : done + rows], rows, num_keys, cache, with_logits=False)
            done += rows

    def forward(self, token_ids: Sequence[int], cache: KVCache) -> ModelOutput:
        """One pass over 1 to `max_rows(cache.length)` tokens; see `LanguageModel.forward`."""
        cache = self._checked(token_ids, cache)
        rows, start = len(token_ids), cache.length
        if not 1 <= rows <= self._numerics.max_rows(start):
            raise ValueError(f"{rows} tokens at {start}: allowed are 1 to {self._numerics.max_rows(start)}")
        computed = self._numerics.padded_rows(rows) if self._pads else rows
        num_keys = self._numerics.num_keys(start, computed)
        logits = self._run(token_ids, computed, num_keys, cache, with_logits=True)
        assert logits is not None
        return ModelOutput(logits=logits[:rows])

    def choose(self, token_ids: Sequence[int], cache: KVCache) -> list[int]:
        """`forward`, and the most likely token after each of its tokens."""
        columns = argmax_rows(self.forward(token_ids, cache).logits)
        return columns if self._output_id_list is None else [self._output_id_list[column] for column in columns]

    def _run(
        self, token_ids: Sequence[int], computed: int, num_keys: int, cache: PreallocatedCache, *, with_logits: bool
    ) -> Tensor | None:
        """Run the network over the tokens padded to `computed` rows, and move the cache by the real ones."""
        start, rows = cache.length, len(token_ids)
        ids = [*token_ids, *[_PADDING_ID] * (computed - rows)]
        cache.begin(computed, num_keys)
        with torch.inference_mode():
            logits = self._network(
                torch.tensor(ids, device=self._network.device),
                self._positions[start : start + computed],
                self._mask.at(start, computed, num_keys),
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
