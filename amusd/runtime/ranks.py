"""The ranks of one target: commands of the first one, and exchanges of tensors between all.

The leader has the followers compute each of its passes, by a message on each link. Tensors go through a process group
(`models/process_group.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Literal, TypeAlias

import msgspec

from amusd.config import TransportConfig
from amusd.errors import ConfigError, PeerError, PeerLostError, PeerProtocolError, RankLostError, first_line
from amusd.models.meeting import Meeting
from amusd.models.passes import Command
from amusd.models.process_group import ProcessGroup
from amusd.models.rank_commands import command_encoder
from amusd.sampling.sampler import Level
from amusd.transport.factory import numbered_link
from amusd.transport.torch_distributed import Backend

IDLE_SECONDS = 1.0
LOOK_SECONDS = 0.02
REASON_SECONDS = 1.0
"""How long the reason may take to arrive after a failed exchange."""

Report: TypeAlias = tuple[Literal["ready", "mistake", "failed", "lost"], str]
"""A follower is ready, or ends by the user's mistake or another rank's loss; and why."""


class Leader(ProcessGroup):
    """The first rank. The others end when it closes."""

    def __init__(self, config: TransportConfig, meeting: Meeting, size: int, backend: Backend = "gloo") -> None:
        """Listen for the followers. Raises `ConfigError`."""
        super().__init__(0, size, meeting, backend)
        self._encode = command_encoder()
        try:
            for rank in range(1, size):
                self._links[rank] = numbered_link(config, meeting.address, rank, "target", listens=True)
        except ConfigError:
            self.close()
            raise

    def await_followers(self, device: str, timeout_seconds: float) -> None:
        """Wait until all are ready, and meet them.

        Raises `ConfigError` for the user's mistake, `PeerError` when one fails or does not come.
        """
        if missing := self._missing(timeout_seconds):
            raise RankLostError(f"rank {missing[0]} of the target was not ready in {timeout_seconds:g} s")
        self._send(b"meet")
        self.meet(device)

    def announce(self, work: Command, level: Level | None) -> None:
        """See `Ranks`. Raises `PeerError` when one is gone."""
        self._send(self._encode(work, level))

    def close(self) -> None:
        """Let the followers end. Idempotent."""
        super().close()
        self.meeting.stop()

    def _send(self, frame: bytes) -> None:
        try:
            with self._using:
                for link in self._links.values():
                    link.send_frame(frame)
        except PeerLostError:
            raise self._reason(RankLostError("a rank of the target is gone")) from None

    def _has_reported(self, rank: int) -> bool:
        """Whether a follower has said that it is ready, or that another one is lost. Raises why that rank ends."""
        try:
            with self._using:
                frame = self._links[rank].receive_frame(0.0)
        except PeerLostError:
            failure = self.meeting.failure(rank, REASON_SECONDS)
            raise failure or RankLostError(f"rank {rank} of the target is gone") from None
        if frame is None:
            failure = self.meeting.failure(rank, 0.0)  # of a process that has ended before it has come
            if failure is not None:
                raise failure
            return False
        try:
            kind, text = msgspec.msgpack.decode(frame, type=Report)
        except msgspec.MsgspecError as error:
            raise PeerProtocolError(f"rank {rank} of the target: {error}") from None
        if kind == "mistake":
            raise ConfigError(text)
        if kind == "failed":
            raise PeerError(f"rank {rank} of the target failed: {text}")
        return True

    def _missing(self, timeout_seconds: float) -> list[int]:
        """The ranks that have reported nothing by then. Raises why one ends."""
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
    """Another rank, connected once it is `ready`."""

    def __init__(
        self, config: TransportConfig, meeting: Meeting, rank: int, size: int, backend: Backend = "gloo"
    ) -> None:
        """Look for the leader. Raises `ConfigError`."""
        super().__init__(rank, size, meeting, backend)
        self._link = self._links[0] = numbered_link(config, meeting.address, rank, "target", listens=False)

    def ready(self, device: str, timeout_seconds: float) -> None:
        """Report a loaded model, and wait for the others. Raises `RankLostError`."""
        try:
            self._say("ready")
            frame = self._link.receive_frame(timeout_seconds)
        except PeerLostError:
            raise RankLostError("rank 0 of the target is gone") from None
        if frame is None:
            raise RankLostError(f"rank 0 of the target was not ready in {timeout_seconds:g} s")
        self.meet(device)

    def commands(self) -> Iterator[bytes]:
        """The leader's messages, until it ends."""
        while True:
            try:
                with self._using:
                    frame = self._link.receive_frame(IDLE_SECONDS)
            except PeerLostError:
                return
            if frame is not None:
                yield frame

    def close(self, error: BaseException | None = None) -> None:
        """Leave; the leader is told why, unless it was a signal. Idempotent."""
        with suppress(PeerLostError):  # the leader is gone
            if isinstance(error, RankLostError):
                self._say("lost")
            elif isinstance(error, ConfigError):
                self._say("mistake", str(error))
            elif isinstance(error, Exception):
                self._say("failed", first_line(error))
        super().close()

    def _say(self, kind: str, text: str = "") -> None:
        with self._using:
            self._link.send_frame(msgspec.msgpack.encode((kind, text)))
