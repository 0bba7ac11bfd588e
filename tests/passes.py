"""A cache of one sequence and a pass over its rows, for tests."""

from __future__ import annotations

from collections.abc import Sequence

from amusd.models.kv_cache import KVCache
from amusd.models.passes import ModelOutput, Rows, SamplerRows
from amusd.runner.model_runner import ModelRunner


def prefilled(model: ModelRunner, token_ids: Sequence[int], capacity: int) -> KVCache:
    """A new cache that holds `token_ids`."""
    cache = model.new_cache(capacity)
    model.prefill(token_ids, cache)
    return cache


def forward(
    model: ModelRunner,
    token_ids: Sequence[int],
    cache: KVCache,
    wanted: SamplerRows | None = None,
    parents: Sequence[int] | None = None,
) -> ModelOutput:
    [output] = model.run([Rows(token_ids, cache, wanted, parents)])
    return output
