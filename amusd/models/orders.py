"""What the first of several ranks tells the others: which pass comes next. And what they do with it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from amusd.models.cached_model import CachedModel
from amusd.models.kv_cache import PreallocatedCache
from amusd.models.tree_pass import PathRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One pass, one chunk of a prompt, or which rows of a pass over paths are kept."""

    cache: int
    """Which of the leader's caches."""
    capacity: int
    spare: int
    """Slots that it has for nodes of a tree."""
    start: int
    """Its length before the pass."""
    token_ids: tuple[int, ...]
    with_logits: bool
    nodes: PathRows | None = None
    """Where the rows of a pass over nodes of a tree stand; None: one behind the other."""
    kept: tuple[int, ...] = ()
    """Rows of the pass before, with which the cache goes on; then nothing is to be computed."""
    dropped: tuple[int, ...]
    """Caches that the leader has no more."""

    def to_bytes(self) -> bytes:
        """For a follower."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps(values | {"nodes": None if self.nodes is None else _packed(self.nodes)}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Order:
        """The inverse of `to_bytes`."""
        values: dict[str, Any] = json.loads(data)
        for name in ("token_ids", "kept", "dropped"):
            values[name] = tuple(values[name])
        if values["nodes"] is not None:
            values["nodes"] = _unpacked(**values["nodes"])
        return cls(**values)


def _packed(nodes: PathRows) -> dict[str, Any]:
    """For JSON: what each row sees, a bit a slot."""
    bits = base64.b64encode(np.packbits(nodes.visible, axis=1).tobytes()).decode()
    num_keys = nodes.visible.shape[1]
    return {"positions": nodes.positions, "slots": nodes.slots, "num_keys": num_keys, "visible": bits}


def _unpacked(positions: list[int], slots: list[int], num_keys: int, visible: str) -> PathRows:
    packed = np.frombuffer(base64.b64decode(visible), dtype=np.uint8).reshape(len(positions), -1)
    return PathRows(positions, slots, np.unpackbits(packed, axis=1, count=num_keys).astype(np.bool_))


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
        if order.kept:
            model.keep(order.kept, cache)
        elif order.nodes is not None:
            nodes = order.nodes
            model.forward_tree(order.token_ids, nodes.positions, nodes.slots, nodes.visible, cache)
            cache.path_slots = nodes.slots
        elif order.with_logits:
            model.forward(order.token_ids, cache)
        else:
            model.prefill(order.token_ids, cache)
