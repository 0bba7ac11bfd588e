"""Passes announced by the first of several ranks to the others, which compute the same on their parts.

So all capture and replay the same passes in one order, as exchanges in CUDA graphs require. Nothing is answered. A
cache is sent with its length, so a rollback needs no message. Only the first rank samples.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from amusd.errors import PeerProtocolError
from amusd.models.cached_model import CachedModel
from amusd.models.kv_cache import KVCache, KVMemory
from amusd.models.passes import Pass, Sampler, SamplerRows


class PassEncoder:
    """Writes the messages of one leader."""

    def __init__(self) -> None:
        self._count = itertools.count(1)
        self._memories: weakref.WeakKeyDictionary[KVMemory, int] = weakref.WeakKeyDictionary()
        self._dropped: list[int] = []
        self._samplers: dict[Sampler, int] = {}

    def encode(self, work: Pass) -> bytes:
        """A message: the memories that are gone, the sampler's number or 0, and the pass."""
        dropped = [self._dropped.pop() for _ in range(len(self._dropped))]
        sampler = 0 if work.sampler is None else self._samplers.setdefault(work.sampler, len(self._samplers) + 1)
        work = replace(work, rows=[replace(rows, wanted=None) for rows in work.rows])
        return msgspec.msgpack.encode((dropped, sampler, work), enc_hook=self._encode)

    def _encode(self, value: KVCache | npt.NDArray[np.int64]) -> Any:
        if isinstance(value, np.ndarray):
            return value.astype(np.int32).tobytes()
        memory = value.memory
        number = self._memories.get(memory)
        if number is None:
            number = self._memories[memory] = next(self._count)
            weakref.finalize(memory, self._dropped.append, number).atexit = False
        num_caches = memory.num_slots // value.allocated
        return number, num_caches, value.capacity, value.spare, value.number, value.length


@dataclass(frozen=True, slots=True)
class _OtherRanksSampler:
    """Stands for the leader's `Sampler`."""

    number: int
    level = 0
    num_inputs = 0
    num_outputs = 0
    neutral = np.zeros(0, dtype=np.int64)

    def compute(self, logits: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002 - there are none
        return logits.argmax(dim=-1), torch.empty((len(logits), 0), dtype=torch.int32, device=logits.device)

    def of_row(self, row: npt.NDArray[np.float32], words: npt.NDArray[np.int64]) -> tuple[int, npt.NDArray[np.int32]]:  # noqa: ARG002
        return int(row.argmax()), np.empty(0, dtype=np.int32)


def follow(model: CachedModel, frames: Iterable[bytes]) -> None:
    """Compute every announced pass on this rank's part of the model.

    Raises `PeerProtocolError` for a malformed one, `PeerError` if another rank is lost.
    """
    memories: dict[int, list[KVCache]] = {}

    def decode(kind: type, value: Any) -> object:
        if kind is not KVCache:
            return np.frombuffer(value, np.int32).astype(np.int64)
        memory, num_caches, capacity, spare, number, length = value
        if memory not in memories:
            memories[memory] = model.new_caches(num_caches, capacity, spare=spare)
        cache = memories[memory][number]
        cache.truncate(length)
        return cache

    decoder = msgspec.msgpack.Decoder(tuple[list[int], int, Pass], dec_hook=decode)
    for frame in frames:
        try:
            dropped, sampler, work = decoder.decode(frame)
        except msgspec.MsgspecError as error:
            raise PeerProtocolError(f"rank 0 of the target: {error}") from None
        for number in dropped:
            memories.pop(number, None)
        if sampler:
            wanted = SamplerRows(_OtherRanksSampler(sampler), np.zeros((1, 0), dtype=np.int64))
            work = replace(work, rows=[replace(rows, wanted=wanted) for rows in work.rows])
        model.compute(work)
