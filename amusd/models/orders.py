"""What the first of several ranks tells the others: which pass comes next. And what they do with it.

The others make the same calls on their part of the model. So they capture the same passes in the same order, and replay
the same one at a time, as exchanges in CUDA graphs need it. They answer nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from amusd.errors import NotFiniteError
from amusd.models.cached_model import CachedModel
from amusd.models.captured import OtherRanksDigest
from amusd.models.kv_cache import PreallocatedCache
from amusd.models.language_model import DigestRequest
from amusd.models.sharding import Work
from amusd.models.tree_pass import PathRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """To do some work with one of the leader's caches."""

    cache: int
    """Which of the leader's caches."""
    capacity: int
    spare: int
    """Slots that it has for nodes of a tree."""
    start: int
    """Its length before the work."""
    work: Work
    dropped: tuple[int, ...]
    """Caches that the leader has no more."""

    def to_bytes(self) -> bytes:
        """For a follower."""
        work = _as_mapping(self.work)
        nodes = None if self.work.nodes is None else _packed(self.work.nodes)
        return json.dumps(_as_mapping(self) | {"work": work | {"nodes": nodes}}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Order:
        """The inverse of `to_bytes`."""
        values: dict[str, Any] = json.loads(data)
        work, dropped = values.pop("work"), tuple(values.pop("dropped"))
        if work["nodes"] is not None:
            work["nodes"] = _unpacked(**work["nodes"])
        return cls(**values, work=Work(**work), dropped=dropped)


def _as_mapping(of: Order | Work) -> dict[str, Any]:
    return {field.name: getattr(of, field.name) for field in fields(of)}


def _packed(nodes: PathRows) -> dict[str, Any]:
    """For JSON: the prefix as runs of slots that follow each other."""
    breaks = np.flatnonzero(np.diff(nodes.prefix, prepend=-2) != 1)
    counts = np.diff(breaks, append=len(nodes.prefix))
    runs = np.stack((nodes.prefix[breaks], counts), axis=1)
    return {"runs": runs.tolist(), "paths": [list(path) for path in nodes.paths]}


def _unpacked(runs: list[list[int]], paths: list[list[int]]) -> PathRows:
    prefix = [np.arange(first, first + count) for first, count in runs]
    return PathRows(np.concatenate((np.arange(0), *prefix)), paths)


def follow(model: CachedModel, orders: Iterable[Order]) -> None:
    """Do every pass that is ordered with this rank's part of the model. Raises `PeerError` when another rank is lost.

    A rollback needs no order of its own: each pass says where it starts, or where each of its nodes goes.
    """
    caches: dict[int, PreallocatedCache] = {}
    for order in orders:
        for number in order.dropped:
            caches.pop(number, None)
        cache = caches.get(order.cache)
        if cache is None:
            cache = caches[order.cache] = model.new_cache(order.capacity, spare=order.spare)
        cache.truncate(order.start)
        _do(order.work, model, cache)


def _do(work: Work, model: CachedModel, cache: PreallocatedCache) -> None:
    digest = OtherRanksDigest(work.digest) if work.digest else None
    wanted = None if digest is None else DigestRequest(digest, digest.no_inputs(len(work.token_ids)))
    nodes = work.nodes
    if work.prepares:
        model.prepare(cache, (digest,), work.steps)
    elif work.kept:
        model.keep(work.kept, cache)
    elif nodes is not None:
        model.forward_tree(work.token_ids, nodes.prefix, nodes.paths, cache, wanted)
        cache.path_slots = nodes.slots
    elif work.steps > 1:
        num_fitting = cache.capacity - cache.length - len(work.token_ids) + 1  # a replay may pass the end
        with suppress(NotFiniteError):  # the first rank finds the same, and says so
            model.extend(work.token_ids, cache, min(work.steps, num_fitting))
    elif work.with_logits:
        model.forward(work.token_ids, cache, wanted)
    else:
        model.prefill(work.token_ids, cache)
