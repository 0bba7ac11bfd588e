"""The ranks of one target: rank 0 leads, the others follow its commands and compute the same on their parts.

All ranks thus capture and replay the same passes in one order, as exchanges in CUDA graphs require. Commands have no
answers. A cache is sent with its length, so a rollback needs no message. Samples of the followers are not used. Tensors
go through a process group (`runner/process_group.py`).
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from amusd.config import TransportConfig
from amusd.errors import ConfigError, PeerLostError, PeerProtocolError, RankLostError
from amusd.models.kv_cache import KVCache, KVMemory
from amusd.models.passes import Forward, RankCommand
from amusd.protocol.messages import Failed, Ready
from amusd.runner.model_runner import ModelRunner
from amusd.runner.process_group import ProcessGroup
from amusd.runtime.hello import failure_report, reported
from amusd.runtime.workers import Rendezvous
from amusd.sampling.sampler import Level, RowSampler
from amusd.transport.factory import numbered_link
from amusd.transport.torch_distributed import Backend

IDLE_SECONDS = 1.0
LOOK_SECONDS = 0.02
REASON_SECONDS = 1.0
"""Longest wait for the reason of a failed exchange."""


class Leader(ProcessGroup):
    """Rank 0. The other ranks end when it closes."""

    def __init__(self, config: TransportConfig, rendezvous: Rendezvous, size: int, backend: Backend) -> None:
        """Listen for the followers. Raises `ConfigError`."""
        super().__init__(0, size, rendezvous.address, backend, rendezvous.host, rendezvous.store)
        self._rendezvous = rendezvous
        self._encode = command_encoder()
        try:
            for rank in range(1, size):
                self._links[rank] = numbered_link(config, rendezvous.address, rank, listens=True)
        except ConfigError:
            self.close()
            raise

    def await_followers(self, device: str, timeout_seconds: float) -> None:
        """Wait until all followers are ready, and form the group. Raises `ConfigError`, or `PeerError` if any fails."""
        if missing := self._missing(timeout_seconds):
            raise RankLostError(f"rank {missing[0]} of the target was not ready in {timeout_seconds:g} s")
        self._send(b"form")
        self.form(device)

    def announce(self, work: RankCommand, level: Level | None) -> None:
        """See `Ranks`. Raises `PeerError` when a follower is gone."""
        self.check()
        self._send(self._encode(work, level))

    def _send(self, frame: bytes) -> None:
        try:
            with self._using:
                for link in self._links.values():
                    link.send_frame(frame)
        except PeerLostError:
            raise self._reason(RankLostError("a rank of the target is gone")) from None

    def _has_reported(self, rank: int) -> bool:
        """Whether a follower has reported that it is ready or that another rank is lost. Raises its own failure."""
        try:
            with self._using:
                message = self._links[rank].receive(0.0)
        except PeerLostError:
            failure = self._rendezvous.failure(rank, REASON_SECONDS)
            raise failure or RankLostError(f"rank {rank} of the target is gone") from None
        except ConfigError as error:
            raise ConfigError(f"rank {rank} of the target: {error}") from None
        if message is None:
            failure = self._rendezvous.failure(rank, 0.0)  # of a process that ended before it connected
            if failure is not None:
                raise failure
            return False
        if isinstance(message, Failed) and message.kind != RankLostError.__name__:
            raise reported(message, f"rank {rank} of the target failed")
        return True

    def _missing(self, timeout_seconds: float) -> list[int]:
        """The ranks that have not reported within `timeout_seconds`. Raises a reported failure."""
        deadline = time.monotonic() + timeout_seconds
        waiting = list(self._links)
        while (waiting := [rank for rank in waiting if not self._has_reported(rank)]) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        return waiting

    def _reason(self, error: RankLostError) -> Exception:
        try:
            self._missing(REASON_SECONDS)
        except Exception as reason:  # noqa: BLE001 - it is raised by the caller
            return reason
        return error


class Follower(ProcessGroup):
    """A rank after the first. It joins the group in `ready`."""

    def __init__(self, config: TransportConfig, rendezvous: Rendezvous, rank: int, size: int, backend: Backend) -> None:
        """Look for the leader. Raises `ConfigError`."""
        super().__init__(rank, size, rendezvous.address, backend, rendezvous.host, rendezvous.store)
        self._link = self._links[0] = numbered_link(config, rendezvous.address, rank, listens=False)

    def ready(self, device: str, timeout_seconds: float) -> None:
        """Report that the model is loaded, and wait for the other ranks. Raises `RankLostError`."""
        try:
            self._link.send(Ready())
            frame = self._link.receive_frame(timeout_seconds)
        except PeerLostError:
            raise RankLostError("rank 0 of the target is gone") from None
        if frame is None:
            raise RankLostError(f"rank 0 of the target was not ready in {timeout_seconds:g} s")
        self.form(device)

    def commands(self) -> Iterator[bytes]:
        """Yield messages until the leader ends."""
        while True:
            try:
                with self._using:
                    frame = self._link.receive_frame(IDLE_SECONDS)
            except PeerLostError:
                return
            if frame is not None:
                yield frame

    def close(self, error: BaseException | None = None) -> None:
        """Leave, and report an `error` to the leader unless it is a signal. Idempotent."""
        if isinstance(error, Exception):
            with suppress(PeerLostError), self._using:  # the leader is gone
                self._link.send(failure_report(error))
        super().close()


def command_encoder() -> Callable[[RankCommand, Level | None], bytes]:
    """Return the encoder of one leader, whose frames also hold the freed memories and the sampler's level."""
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

    def encode(work: RankCommand, level: Level | None) -> bytes:
        gone = [dropped.pop() for _ in range(len(dropped))]
        if isinstance(work, Forward):
            work = Forward([replace(rows, wanted=None) for rows in work.rows], work.steps)
        return msgspec.msgpack.encode((gone, level, work), enc_hook=encode_part)

    return encode


def follow(model: ModelRunner, frames: Iterable[bytes]) -> None:
    """Follow every command on this rank's part of the model.

    Raises `PeerProtocolError` for a malformed command, `PeerError` if another rank is lost.
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

    decoder = msgspec.msgpack.Decoder(tuple[list[int], Level | None, RankCommand], dec_hook=decode)
    for frame in frames:
        try:
            dropped, level, work = decoder.decode(frame)
        except msgspec.MsgspecError as error:
            raise PeerProtocolError(f"rank 0 of the target: {error}") from None
        for number in dropped:
            memories.pop(number, None)
        sampler = None if level is None else RowSampler(model.sampling_state(work.cache)[0], level)
        model.compute(work, sampler)
