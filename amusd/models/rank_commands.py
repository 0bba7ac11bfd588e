"""Commands of the first of several ranks to the others, which make the same calls on their part of the model.

So they capture the same passes in the same order, and replay the same one at a time, as exchanges in CUDA graphs
require. They answer nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amusd.models.cached_model import CachedModel
from amusd.models.kv_cache import PreallocatedCache
from amusd.models.language_model import DigestRequest
from amusd.models.passes import Pass, PathRows


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommand:
    """One call on one of the leader's caches: compute a pass, or keep rows of the last one."""

    cache: int
    """Number of the leader's cache."""
    capacity: int
    spare: int
    """Its slots for nodes of a tree."""
    start: int
    """Its length before the call."""
    dropped: tuple[int, ...] = ()
    """Caches that the leader has no more."""
    work: Pass | None = None
    """The pass, without its digest; None: keep rows."""
    digest: int = 0
    """Number of the leader's digest that the pass ends with; 0: none."""
    kept: Sequence[int] = ()

    def to_bytes(self) -> bytes:
        """JSON for a follower."""
        values = _as_mapping(self)
        if self.work is not None:
            rows = self.work.rows
            values["work"] = _as_mapping(self.work) | {"rows": None if rows is None else _packed(rows), "wanted": None}
        return json.dumps(values).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> RankCommand:
        """The inverse of `to_bytes`."""
        values: dict[str, Any] = json.loads(data)
        values["dropped"] = tuple(values["dropped"])
        if (work := values["work"]) is not None:
            rows = work["rows"]
            values["work"] = Pass(**work | {"rows": None if rows is None else _unpacked(**rows)})
        return cls(**values)


@dataclass(frozen=True, slots=True)
class OtherRanksDigest:
    """A `LogitsDigest` that stands for one of the leader, which alone reads it."""

    number: int
    num_inputs = 0
    num_outputs = 0

    def compute(self, logits: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002 - there are none
        """See `LogitsDigest`."""
        return logits.argmax(dim=-1), torch.empty((len(logits), 0), dtype=torch.int32, device=logits.device)


def follow(model: CachedModel, commands: Iterable[RankCommand]) -> None:
    """Make every call that is commanded on this rank's part of the model. Raises `PeerError` if another rank is lost.

    A rollback needs no command of its own: each pass says where it starts, or where each of its nodes goes.
    """
    caches: dict[int, PreallocatedCache] = {}
    for command in commands:
        for number in command.dropped:
            caches.pop(number, None)
        cache = caches.get(command.cache)
        if cache is None:
            cache = caches[command.cache] = model.new_cache(command.capacity, spare=command.spare)
        cache.truncate(command.start)
        work = command.work
        if work is None:
            model.keep(command.kept, cache)
            continue
        if command.digest:
            inputs = np.zeros((len(work.token_ids), 0), dtype=np.int64)
            work = replace(work, wanted=DigestRequest(OtherRanksDigest(command.digest), inputs))
        model.run(work, cache)
        if work.rows is not None:
            cache.path_slots = work.rows.slots


def _as_mapping(of: RankCommand | Pass) -> dict[str, Any]:
    return {field.name: getattr(of, field.name) for field in fields(of)}


def _packed(rows: PathRows) -> dict[str, Any]:
    """For JSON: the prefix as runs of slots that follow each other."""
    breaks = np.flatnonzero(np.diff(rows.prefix, prepend=-2) != 1)
    counts = np.diff(breaks, append=len(rows.prefix))
    runs = np.stack((rows.prefix[breaks], counts), axis=1)
    return {"runs": runs.tolist(), "paths": [list(path) for path in rows.paths]}


def _unpacked(runs: list[list[int]], paths: list[list[int]]) -> PathRows:
    prefix = [np.arange(first, first + count) for first, count in runs]
    return PathRows(np.concatenate((np.arange(0), *prefix)), paths)
