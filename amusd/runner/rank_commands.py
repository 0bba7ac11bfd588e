"""Commands of the first of several ranks to the others, which compute the same on their parts.

All ranks thus capture and replay the same passes in one order, as exchanges in CUDA graphs require. There are no
answers. A cache is sent with its length, so a rollback needs no message. Samples of the other ranks are not used.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from amusd.errors import PeerProtocolError
from amusd.models.kv_cache import KVCache, KVMemory
from amusd.models.passes import Command, Forward
from amusd.runner.model_runner import ModelRunner
from amusd.sampling.sampler import Level, RowSampler


def command_encoder() -> Callable[[Command, Level | None], bytes]:
    """Return a function that encodes one leader's commands, with the memories that are gone and the sampler's level."""
    count = itertools.count(1)
    memories: weakref.WeakKeyDictionary[KVMemory, int] = weakref.WeakKeyDictionary()
    dropped: list[int] = []

    def encode_part(value: KVCache | npt.NDArray[np.int64]) -> Any:
        if isinstance(value, np.ndarray):
            return value.astype(np.int32).tobytes()
        memory = value.memory
        if memory not in memories:
            memories[memory] = next(count)
            weakref.finalize(memory, dropped.append, memories[memory]).atexit = False
        num_caches = memory.num_slots // value.allocated
        return memories[memory], num_caches, value.capacity, value.spare, value.number, value.length

    def encode(work: Command, level: Level | None) -> bytes:
        gone = [dropped.pop() for _ in range(len(dropped))]
        if isinstance(work, Forward):
            work = Forward([replace(rows, wanted=None) for rows in work.rows], work.steps)
        return msgspec.msgpack.encode((gone, level, work), enc_hook=encode_part)

    return encode


def follow(model: ModelRunner, frames: Iterable[bytes]) -> None:
    """Follow every command on this rank's part of the model.

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

    decoder = msgspec.msgpack.Decoder(tuple[list[int], Level | None, Command], dec_hook=decode)
    for frame in frames:
        try:
            dropped, level, work = decoder.decode(frame)
        except msgspec.MsgspecError as error:
            raise PeerProtocolError(f"rank 0 of the target: {error}") from None
        for number in dropped:
            memories.pop(number, None)
        sampler = None if level is None else RowSampler(model.sampling_state(work.cache)[0], level)
        model.compute(work, sampler)
