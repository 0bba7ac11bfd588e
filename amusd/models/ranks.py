"""The meeting of the ranks of one model, and the commands and exchanges between them.

The first rank, the leader, decides everything; before each of its passes it commands the others to compute the same
pass. A command is a few bytes over a socket file in a folder that only this user can enter: the kernel wakes a follower
for a command, and ends the socket with the leader's process, so an idle follower needs no heartbeat. Tensors go through
a process group, and meanwhile a thread watches the sockets (`process_group.py`).
"""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from amusd.errors import ConfigError, PeerFailedError, RankLostError, first_line
from amusd.models.kv_cache import KVMemory
from amusd.models.language_model import Sampler
from amusd.models.passes import Part, Pass
from amusd.models.process_group import Backend, ProcessGroup, Watch, join_store
from amusd.models.rank_commands import PartCommand, RankCommand
from amusd.models.sharding import Ranks

Wire: TypeAlias = "Connection[Any, Any]"

IDLE_SECONDS = 1.0
"""Longest single wait for a command; a follower waits again as long as the leader lives."""
_REASON_SECONDS = 1.0  # after an exchange has failed: how long the reason may take to arrive
_COMMANDS = "commands"
"""Name of the socket file in the folder that is a leader's address."""


class _ConnectedRanks(Ranks):
    """A rank that meets the others in a process group."""

    _others: str
    """The ranks at the other end of this rank's sockets."""

    def __init__(self, rank: int, size: int, backend: Backend) -> None:
        super().__init__(rank, size)
        self.captures = backend == "nccl"
        self._backend: Backend = backend
        self._group: ProcessGroup | None = None
        self._watch: Watch | None = None

    def sum(self, part: Tensor) -> Tensor:
        """See `Ranks`."""
        return self._exchange(self._met.sum, part)

    def join(self, part: Tensor) -> Tensor:
        """See `Ranks`."""
        return self._exchange(self._met.join, part)

    def check(self) -> None:
        """See `Ranks`."""
        if self._watch is not None and self._watch.is_lost:
            raise self._reason(self._gone())

    def abort(self) -> None:
        """See `Ranks`."""
        if self._watch is not None:
            self._watch.end()

    def _meet(self, store: Any, device: str, sockets: Sequence[int]) -> None:
        self._group = ProcessGroup(store, self.rank, self.size, device, self._backend)
        self._watch = Watch(sockets, self._group.abort)

    @property
    def _met(self) -> ProcessGroup:
        assert self._group is not None, "the others are not ready"
        return self._group

    def _exchange(self, exchange: Callable[[Tensor], Tensor], part: Tensor) -> Tensor:
        try:
            return exchange(part)
        except RankLostError as error:
            raise self._reason(error) from None

    def _gone(self, why: str = "") -> RankLostError:
        return RankLostError(f"{self._others} of the target is gone{why}")

    def _reason(self, error: RankLostError) -> Exception:
        """The error behind `error`, as far as this rank knows."""
        return error


class Leader(_ConnectedRanks):
    """The first rank, connected once the followers have come."""

    _others = "a rank"

    def __init__(self, size: int, backend: Backend = "gloo") -> None:
        """Open the meeting place of the `size` ranks. Raises `ConfigError` where there can be none."""
        super().__init__(0, size, backend)
        self._folder = Path(tempfile.mkdtemp(prefix="amusd-ranks-"))
        self._followers: dict[int, Wire] = {}
        self._numbers: weakref.WeakKeyDictionary[KVMemory, int] = weakref.WeakKeyDictionary()
        self._num_memories = 0
        self._dropped: list[int] = []
        self._samplers: dict[Sampler, int] = {}
        try:
            self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._door.bind(str(self._folder / _COMMANDS))
            self._door.listen(size)
        except (OSError, AttributeError) as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise ConfigError(f"target_tensor_parallel_size={size}: no socket file on this machine: {error}") from None

    @property
    def address(self) -> str:
        """The folder in which the followers find this rank."""
        return str(self._folder)

    def await_followers(self, device: str, timeout_seconds: float) -> None:
        """Wait until all have come and are ready to compute, and connect them.

        Raises `ConfigError` for what a follower reports as the user's mistake, `PeerError` when one fails or does not
        come.
        """
        deadline = time.monotonic() + timeout_seconds
        while len(self._followers) < self.size - 1:
            connection = self._accept(deadline)
            self._followers[int(_receive(connection, deadline)["rank"])] = connection
        self._door.close()
        waiting = {connection: rank for rank, connection in self._followers.items()}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankLostError(
                    f"rank {min(waiting.values())} of the target was not ready in {timeout_seconds:g} s"
                )
            for follower in ready:
                assert isinstance(follower, Connection)
                report = _report_of(follower)
                if not report.get("ready"):
                    raise self._as_error(waiting[follower], report)
                del waiting[follower]
        self._send(b"{}")  # all are there: meet
        self._meet(
            join_store(self._folder, self.size),
            device,
            [connection.fileno() for connection in self._followers.values()],
        )
        shutil.rmtree(self._folder, ignore_errors=True)

    def announce(self, parts: Sequence[Part], work: Pass | None, kept: Sequence[int] = ()) -> None:
        """Command the followers to do this. Raises `PeerError` when one is gone."""
        cache = parts[0].cache
        number = self._numbers.get(cache.memory)
        if number is None:
            self._num_memories += 1
            number = self._numbers[cache.memory] = self._num_memories
            weakref.finalize(cache.memory, self._dropped.append, number).atexit = False
        dropped = tuple(self._dropped)
        del self._dropped[: len(dropped)]
        sampler = 0
        if work is not None and work.sampler is not None:
            sampler = self._samplers.setdefault(work.sampler, len(self._samplers) + 1)
        command = RankCommand(
            memory=number,
            num_caches=cache.memory.num_slots // cache.allocated,
            capacity=cache.capacity,
            spare=cache.spare,
            dropped=dropped,
            parts=tuple(PartCommand(part.cache.number, part.cache.length, part.token_ids, part.rows) for part in parts),
            with_logits=work is None or work.with_logits,
            steps=1 if work is None else work.steps,
            sampler=sampler,
            kept=kept if work is None else None,
        )
        self._send(command.to_bytes())

    def close(self) -> None:
        """Let the followers end. Idempotent."""
        self._door.close()
        self.abort()
        for connection in self._followers.values():
            connection.close()
        self._group = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, data: bytes) -> None:
        try:
            for connection in self._followers.values():
                connection.send_bytes(data)
        except OSError as error:
            raise self._reason(self._gone(f": {error}")) from None

    def _accept(self, deadline: float) -> Wire:
        self._door.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            accepted, _ = self._door.accept()
        except TimeoutError:
            missing = sorted(set(range(1, self.size)) - set(self._followers))
            raise RankLostError(f"rank {missing[0]} of the target did not come") from None
        accepted.settimeout(None)  # a Connection polls by itself
        return Connection(accepted.detach())

    def _reason(self, error: RankLostError) -> Exception:
        """The end of a rank that is behind `error`, as the followers' last words tell; else the error itself."""
        deadline = time.monotonic() + _REASON_SECONDS
        waiting = {connection: rank for rank, connection in self._followers.items()}
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)
                report = _report_of(connection)
                if not report.get("lost"):  # a rank that ends because of another is not the reason
                    return self._as_error(waiting[connection], report)
                del waiting[connection]
        return error

    def _as_error(self, rank: int, report: dict[str, Any]) -> ConfigError | PeerFailedError | RankLostError:
        if "failure" not in report:
            return RankLostError(f"rank {rank} of the target is gone")
        if report["users_mistake"]:
            return ConfigError(report["failure"])
        return PeerFailedError(f"rank {rank} of the target failed: {report['failure']}")


class Follower(_ConnectedRanks):
    """Another rank, connected once it is `ready`."""

    _others = "rank 0"

    def __init__(self, address: str, rank: int, size: int, backend: Backend = "gloo") -> None:
        """Come to the leader at `address`. Raises `RankLostError` when it is not there."""
        super().__init__(rank, size, backend)
        self._folder = Path(address)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(self._folder / _COMMANDS))
        except OSError as error:
            connection.close()
            raise RankLostError(f"rank 0 of the target is not on this machine, or gone: {error}") from None
        self._leader = Connection(connection.detach())
        self._say(rank=rank)

    def ready(self, device: str, timeout_seconds: float) -> None:
        """The model is loaded: wait for the others to be ready too. Raises `RankLostError`."""
        self._say(ready=True)
        _receive(self._leader, time.monotonic() + timeout_seconds)
        try:
            store = join_store(self._folder, self.size)
        except RuntimeError as error:
            raise self._gone(f": {first_line(error)}") from None
        self._meet(store, device, [self._leader.fileno()])

    def commands(self) -> Iterator[RankCommand]:
        """The leader's commands, until it ends."""
        while True:
            if not self._leader.poll(IDLE_SECONDS):
                continue
            try:
                data = self._leader.recv_bytes()
            except (EOFError, OSError):
                return
            yield RankCommand.from_bytes(data)

    def close(self, error: BaseException | None = None) -> None:
        """Leave; the leader is told why, unless it was a signal. Idempotent."""
        with suppress(RankLostError):  # the leader is gone
            if isinstance(error, RankLostError):
                self._say(lost=True)
            elif isinstance(error, Exception):
                self._say(failure=first_line(error), users_mistake=isinstance(error, ConfigError))
        self.abort()
        self._leader.close()
        self._group = None

    def _say(self, **values: Any) -> None:
        try:
            self._leader.send_bytes(json.dumps(values).encode())
        except OSError as error:
            raise self._gone(f": {error}") from None


def _receive(connection: Wire, deadline: float) -> dict[str, Any]:
    """The next message of the other end. Raises `RankLostError` when it ends or the deadline passes."""
    try:
        if connection.poll(max(0.0, deadline - time.monotonic())):
            values: dict[str, Any] = json.loads(connection.recv_bytes())
            return values
    except (EOFError, OSError):
        raise RankLostError("another rank of the same model is gone") from None
    raise RankLostError("another rank of the same model says nothing")


def _report_of(connection: Wire) -> dict[str, Any]:
    """The message of a follower whose connection is readable; empty when it is gone."""
    try:
        values: dict[str, Any] = json.loads(connection.recv_bytes())
    except (EOFError, OSError):
        return {}
    return values
