"""Passes computed anew each time, on a CPU: padded and cut by `numerics.py`, with `SplitAttention`."""

from __future__ import annotations

import torch
from torch import Tensor

from amusd.models.kv_cache import PreallocatedCache
from amusd.models.numerics import Numerics
from amusd.models.passes import PADDING_ID, Network, Pass
from amusd.models.split_attention import BLOCK, SplitAttention

_KEYS_STEP = 64
"""The keys of a tree are read up to a multiple of this, so that shapes repeat."""


class EagerPasses:
    """Runs a network over any cache. For one thread: each pass writes its token ids where the last one did."""

    def __init__(self, network: Network, numerics: Numerics, max_length: int) -> None:
        """`max_length`: positions that the model knows."""
        if numerics.fixed and numerics.border is not None and BLOCK % numerics.border:
            raise ValueError(f"border={numerics.border} must divide {BLOCK}, the block of attention on a CPU")
        self._network = network
        self._numerics = numerics
        self._token_ids = torch.full((max(numerics.width, numerics.prefill_chunk),), PADDING_ID)
        self._token_ids_view = self._token_ids.numpy()  # written before each pass
        # Rows of padding may stand beyond the last position the model knows.
        self._positions = torch.arange(numerics.allocation(max_length)).clamp_(max=max_length - 1)

    def run(self, work: Pass, cache: PreallocatedCache) -> list[Tensor]:
        """Compute a pass; returns its logits [tokens, vocab], or nothing for a prompt."""
        with torch.inference_mode():
            logits = self._run_chain(work, cache) if work.rows is None else self._run_paths(work, cache)
        return [] if logits is None else [logits[: len(work.token_ids)]]

    def _run_chain(self, work: Pass, cache: PreallocatedCache) -> Tensor | None:
        start, rows = cache.length, len(work.token_ids)
        if work.with_logits:
            # A bucketed pass is not padded: no kernel is chosen or captured by its shape.
            computed = self._numerics.padded_rows(rows) if self._numerics.fixed else rows
            num_keys, products = self._numerics.num_keys(start, computed), cache.dtype
        else:
            computed, num_keys = rows, self._numerics.prefill_keys(start + rows)
            products = self._network.cache_dtype  # many rows are worth a conversion
        self._token_ids_view[:rows] = work.token_ids
        self._token_ids_view[rows:computed] = PADDING_ID
        cache.begin(computed, num_keys)
        logits = self._network(
            self._token_ids[:computed],
            self._positions[start : start + computed],
            SplitAttention.of_chain(start, computed, num_keys, products),
            cache,
            with_logits=work.with_logits,
        )
        cache.advance(rows)
        return logits

    def _run_paths(self, work: Pass, cache: PreallocatedCache) -> Tensor | None:
        where = work.rows
        assert where is not None
        num_keys = self._numerics.num_keys(len(where.prefix), 1)  # `fixed`: a function of the position alone
        if num_keys < where.num_keys:
            num_keys = min(-(-where.num_keys // _KEYS_STEP) * _KEYS_STEP, cache.allocated)
        cache.begin(len(work.token_ids), num_keys, torch.tensor(where.slots))
        return self._network(
            torch.tensor(work.token_ids),
            torch.tensor(where.positions),
            SplitAttention.of_paths(where.num_shared, torch.from_numpy(where.visible(num_keys)), cache.dtype),
            cache,
            with_logits=True,
        )
