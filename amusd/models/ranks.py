"""The ranks of one model: commands of the first one to the others, and exchanges of tensors between all.

The first rank, the leader, decides everything; before each of its passes it commands the others, the followers, to
compute the same pass. A command is a short message on the link to each follower. Tensors go through a process group,
and meanwhile a thread watches the links (`process_group.py`).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
from torch import Tensor

from amusd import __version__
from amusd.errors import ConfigError, PeerFailedError, PeerLostError, PeerProtocolError, RankLostError, first_line
from amusd.models.kv_cache import KVMemory
from amusd.models.language_model import Sampler
from amusd.models.meeting import Meeting
from amusd.models.passes import Part, Pass
from amusd.models.process_group import Backend, ProcessGroup, Watch
from amusd.models.rank_commands import PartCommand, PathsCommand, RankCommand
from amusd.models.sharding import Ranks

IDLE_SECONDS = 1.0
"""Longest single wait for a command; a follower waits again as long as the leader is there."""
LOOK_SECONDS = 0.02
"""How often the leader looks for a report of a follower that it waits for."""
REASON_SECONDS = 1.0
"""How long the reason may take to arrive once an exchange has failed."""


class Link(Protocol):
    """One end of a link between the leader and a follower. All but `close` may raise `PeerLostError`."""

    def send_frame(self, frame: bytes) -> None:
        """Queue a message."""
        ...

    def receive_frame(self, timeout: float) -> bytes | None:
        """The next message, or None after `timeout` seconds."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether the other end has come and gone."""
        ...

    def close(self) -> None:
        """Release everything. Idempotent."""
        ...


@dataclass(frozen=True)
class Report:
    """What a follower says: that it is ready, or why it ends."""

    kind: Literal["ready", "mistake", "failed", "lost"]
    """`mistake`: of the user's. `lost`: another rank is."""
    text: str = __version__
    """The version of a rank that is ready; else the reason."""


class _ConnectedRanks(Ranks):
    """A rank that meets the others in a process group."""

    _others: str
    """The ranks at the other end of this rank's links."""

    def __init__(self, rank: int, size: int, links: Mapping[int, Link], meeting: Meeting, backend: Backend) -> None:
        super().__init__(rank, size)
        self.captures = backend == "nccl"
        self._links = dict(links)
        self._using = threading.Lock()
        """Held by the thread that uses a link: this rank's, or that of the watch."""
        self._meeting = meeting
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
            raise self._reason(RankLostError(f"{self._others} of the target is gone"))

    def abort(self) -> None:
        """See `Ranks`."""
        if self._watch is not None:
            self._watch.end()

    def close(self) -> None:
        """Leave. Idempotent."""
        self.abort()
        with self._using:
            for link in self._links.values():
                link.close()
        self._group = None

    def _meet(self, device: str) -> None:
        self._group = ProcessGroup(self._meeting, self.rank, self.size, device, self._backend)
        self._watch = Watch(self._has_lost_another, self._group.abort)

    @property
    def _met(self) -> ProcessGroup:
        assert self._group is not None, "the others are not ready"
        return self._group

    def _has_lost_another(self) -> bool:
        with self._using:
            return any(link.is_lost for link in self._links.values())

    def _exchange(self, exchange: Callable[[Tensor], Tensor], part: Tensor) -> Tensor:
        try:
            return exchange(part)
        except RankLostError as error:
            raise self._reason(error) from None

    def _reason(self, error: RankLostError) -> Exception:
        """The error behind `error`, as far as this rank knows."""
        return error


class Leader(_ConnectedRanks):
    """The first rank, connected once the followers have come."""

    _others = "a rank"

    def __init__(self, links: Sequence[Link], meeting: Meeting, backend: Backend = "gloo") -> None:
        """`links`: to ranks 1 and up; closed by `close`."""
        super().__init__(0, len(links) + 1, dict(enumerate(links, start=1)), meeting, backend)
        self._numbers: weakref.WeakKeyDictionary[KVMemory, int] = weakref.WeakKeyDictionary()
        self._num_memories = 0
        self._dropped: list[int] = []
        self._samplers: dict[Sampler, int] = {}

    def await_followers(self, device: str, timeout_seconds: float) -> None:
        """Wait until all are ready to compute, and meet them.

        Raises `ConfigError` for what a follower reports as the user's mistake, `PeerError` when one fails or does not
        come.
        """
        deadline = time.monotonic() + timeout_seconds
        waiting = list(self._links)
        while waiting := [rank for rank in waiting if self._hear(rank) != "ready"]:
            if self._meeting.failure(0.0) is not None:
                raise self._reason(RankLostError("a rank of the target is gone"))
            if time.monotonic() >= deadline:
                raise RankLostError(f"rank {waiting[0]} of the target was not ready in {timeout_seconds:g} s")
            time.sleep(LOOK_SECONDS)
        self._send(b"meet")
        self._meet(device)

    def announce(self, parts: Sequence[Part], work: Pass | None, kept: Sequence[int] = ()) -> None:
        """Command the followers to do this. Raises `PeerError` when one is gone."""
        cache = parts[0].cache
        number = self._numbers.get(cache.memory)
        if number is None:
            self._num_memories += 1
            number = self._numbers[cache.memory] = self._num_memories
            weakref.finalize(cache.memory, self._dropped.append, number).atexit = False
        dropped = list(self._dropped)
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
            parts=[
                PartCommand(part.cache.number, part.cache.length, part.token_ids, PathsCommand.of(part.rows))
                for part in parts
            ],
            with_logits=work is None or work.with_logits,
            steps=1 if work is None else work.steps,
            sampler=sampler,
            kept=kept if work is None else None,
        )
        self._send(command.to_bytes())

    def close(self) -> None:
        """Let the followers end. Idempotent."""
        super().close()
        self._meeting.stop()

    def _send(self, frame: bytes) -> None:
        try:
            with self._using:
                for link in self._links.values():
                    link.send_frame(frame)
        except PeerLostError:
            raise self._reason(RankLostError("a rank of the target is gone")) from None

    def _hear(self, rank: int) -> str | None:
        """The kind of a follower's next report; None when none is there. Raises why that rank cannot go on."""
        try:
            with self._using:
                frame = self._links[rank].receive_frame(0.0)
        except PeerLostError:
            raise self._meeting.failure(REASON_SECONDS) or RankLostError(f"rank {rank} of the target is gone") from None
        if frame is None:
            return None
        try:
            report = msgspec.msgpack.decode(frame, type=Report)
        except msgspec.MsgspecError as error:
            raise PeerProtocolError(f"rank {rank} of the target: {error}") from None
        if report.kind == "mistake":
            raise ConfigError(report.text)
        if report.kind == "failed":
            raise PeerFailedError(f"rank {rank} of the target failed: {report.text}")
        if report.kind == "ready" and report.text != __version__:
            raise ConfigError(f"rank {rank} of the target has amusd {report.text}, and rank 0 has {__version__}")
        return report.kind

    def _reason(self, error: RankLostError) -> Exception:
        """The end of a rank that is behind `error`, as the followers' last words tell; else the error itself."""
        deadline = time.monotonic() + REASON_SECONDS
        waiting = list(self._links)
        while waiting and time.monotonic() < deadline:
            try:
                waiting = [rank for rank in waiting if self._hear(rank) != "lost"]
            except Exception as reason:  # noqa: BLE001 - it is raised by the caller
                return reason
            time.sleep(LOOK_SECONDS)
        return self._meeting.failure(0.0) or error


class Follower(_ConnectedRanks):
    """Another rank, connected once it is `ready`."""

    _others = "rank 0"

    def __init__(self, rank: int, size: int, link: Link, meeting: Meeting, backend: Backend = "gloo") -> None:
        """`link`: to the leader; closed by `close`."""
        super().__init__(rank, size, {0: link}, meeting, backend)
        self._link = link

    def ready(self, device: str, timeout_seconds: float) -> None:
        """The model is loaded: wait for the others to be ready too. Raises `RankLostError`."""
        try:
            self._say(Report("ready"))
            if self._link.receive_frame(timeout_seconds) is None:
                raise RankLostError(f"rank 0 of the target was not ready in {timeout_seconds:g} s")
        except PeerLostError as error:
            raise error if isinstance(error, RankLostError) else RankLostError("rank 0 of the target is gone") from None
        self._meet(device)

    def commands(self) -> Iterator[RankCommand]:
        """The leader's commands, until it ends. Raises `PeerProtocolError` for what is none."""
        while True:
            try:
                with self._using:
                    frame = self._link.receive_frame(IDLE_SECONDS)
            except PeerLostError:
                return
            if frame is not None:
                yield RankCommand.from_bytes(frame)

    def close(self, error: BaseException | None = None) -> None:
        """Leave; the leader is told why, unless it was a signal. Idempotent."""
        with suppress(PeerLostError):  # the leader is gone
            if isinstance(error, RankLostError):
                self._say(Report("lost"))
            elif isinstance(error, ConfigError):
                self._say(Report("mistake", str(error)))
            elif isinstance(error, Exception):
                self._say(Report("failed", first_line(error)))
        super().close()

    def _say(self, report: Report) -> None:
        with self._using:
            self._link.send_frame(msgspec.msgpack.encode(report))
