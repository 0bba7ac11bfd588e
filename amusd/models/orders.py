"""What the first of several ranks tells the others: which pass comes next. And what they do with it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from amusd.models.language_model import KVCache, LanguageModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One pass, or one chunk of a prompt."""

    cache: int
    """Which of the leader's caches."""
    capacity: int
    start: int
    """Its length before the pass."""
    token_ids: tuple[int, ...]
    with_logits: bool
    dropped: tuple[int, ...]
    """Caches that the leader has no more."""

    def to_bytes(self) -> bytes:
        """For a follower."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Order:
        """The inverse of `to_bytes`."""
        values: dict[str, Any] = json.loads(data)
        values["token_ids"], values["dropped"] = tuple(values["token_ids"]), tuple(values["dropped"])
        return cls(**values)


def follow(model: LanguageModel, orders: Iterable[Order]) -> None:
    """Do every pass that is ordered with this rank's part of the model. Raises `PeerError` when another rank is lost.

    A rollback needs no order of its own: each pass says where it starts.
    """
    caches: dict[int, KVCache] = {}
    for order in orders:
        for number in order.dropped:
            caches.pop(number, None)
        cache = caches.get(order.cache)
        if cache is None:
            cache = caches[order.cache] = model.new_cache(order.capacity)
        cache.truncate(order.start)
        if order.with_logits:
            model.forward(order.token_ids, cache)
        else:
            model.prefill(order.token_ids, cache)
