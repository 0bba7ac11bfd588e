"""Commands of the first of several ranks to the others, which make the same calls on their part of the model.

So they capture the same passes in the same order, and replay the same one at a time, as exchanges in CUDA graphs
require. They answer nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import Self

from amusd.errors import PeerProtocolError
from amusd.models.cached_model import CachedModel
from amusd.models.kv_cache import PreallocatedCache
from amusd.models.language_model import SamplerRows
from amusd.models.passes import Part, Pass, PathRows


@dataclass(frozen=True, slots=True)
class PathsCommand:
    """`PathRows` for a message."""

    prefix: bytes
    """The slots as 32-bit numbers."""
    paths: Sequence[Sequence[int]]

    @classmethod
    def of(cls, rows: PathRows | None) -> Self | None:
        """The same rows."""
        return None if rows is None else cls(rows.prefix.astype(np.int32).tobytes(), rows.paths)

    def rows(self) -> PathRows:
        """The inverse of `of`."""
        return PathRows(np.frombuffer(self.prefix, np.int32).astype(np.int64), self.paths)


@dataclass(frozen=True, slots=True)
class PartCommand:
    """The rows of one cache in a pass."""

    cache: int
    """Number of the cache in its memory."""
    start: int
    """Its length before the call."""
    token_ids: Sequence[int] = ()
    paths: PathsCommand | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommand:
    """One call on caches of one of the leader's memories: compute a pass, or keep rows of the last one."""

    memory: int
    """Number of the leader's memory."""
    num_caches: int
    """The caches of that memory."""
    capacity: int
    spare: int
    """Slots of each of them for nodes of a tree."""
    dropped: Sequence[int] = ()
    """Memories that the leader has no more."""
    parts: Sequence[PartCommand]
    with_logits: bool = True
    steps: int = 1
    sampler: int = 0
    """Number of the leader's sampler that the pass ends with; 0: none."""
    kept: Sequence[int] | None = None
    """Rows of the last pass over the one cache of `parts`; None: compute a pass."""

    def to_bytes(self) -> bytes:
        """MessagePack for a follower."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, frame: bytes) -> RankCommand:
        """The inverse of `to_bytes`. Raises `PeerProtocolError`."""
        try:
            return msgspec.msgpack.decode(frame, type=cls)
        except msgspec.MsgspecError as error:
            raise PeerProtocolError(f"rank 0 of the target: {error}") from None


@dataclass(frozen=True, slots=True)
class OtherRanksSampler:
    """Stands for a `Sampler` of the leader, which alone reads what is sampled."""

    number: int
    level = 0
    num_inputs = 0
    num_outputs = 0
    neutral = np.zeros(0, dtype=np.int64)

    def compute(self, logits: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002 - there are none
        """See `Sampler`."""
        return logits.argmax(dim=-1), torch.empty((len(logits), 0), dtype=torch.int32, device=logits.device)

    def of_row(self, row: npt.NDArray[np.float32], words: npt.NDArray[np.int64]) -> tuple[int, npt.NDArray[np.int32]]:  # noqa: ARG002
        """See `Sampler`."""
        return int(row.argmax()), np.empty(0, dtype=np.int32)


def follow(model: CachedModel, commands: Iterable[RankCommand]) -> None:
    """Make every call that is commanded on this rank's part of the model. Raises `PeerError` if another rank is lost.

    A rollback needs no command of its own: each pass says where it starts, or where each of its nodes goes.
    """
    memories: dict[int, list[PreallocatedCache]] = {}
    for command in commands:
        for number in command.dropped:
            memories.pop(number, None)
        caches = memories.get(command.memory)
        if caches is None:
            caches = model.new_caches(command.num_caches, command.capacity, spare=command.spare)
            memories[command.memory] = caches
        for part in command.parts:
            caches[part.cache].truncate(part.start)
        if command.kept is not None:
            model.keep(command.kept, caches[command.parts[0].cache])
            continue
        sampler = OtherRanksSampler(command.sampler) if command.sampler else None
        parts = []
        for part in command.parts:
            inputs = np.zeros((len(part.token_ids), 0), dtype=np.int64)
            rows = None if part.paths is None else part.paths.rows()
            wanted = None if sampler is None else SamplerRows(sampler, inputs)
            parts.append(Part(caches[part.cache], part.token_ids, rows, wanted))
        model.run(Pass(parts, command.with_logits, command.steps))
        for computed in parts:
            if computed.rows is not None:
                computed.cache.path_slots = computed.rows.slots
