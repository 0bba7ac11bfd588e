"""The target's other ranks on one machine: child processes that repeat the first one's passes (`ranks.py`)."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from typing import NoReturn

from amusd.child import Channel, Lives, Orders, command_of, ignore_terminal, serve
from amusd.config import EngineConfig
from amusd.errors import RankLostError
from amusd.models.meeting import Meeting
from amusd.runtime.cores import allowed_cores, pin_rank
from amusd.runtime.devices import device_of
from amusd.settings import from_mapping, to_mapping
from amusd.types import Role


class Followers:
    """The processes of the target's ranks 1 and up; for several threads."""

    def __init__(self, config: EngineConfig) -> None:
        """Start them; does not wait."""
        folder = tempfile.mkdtemp(prefix="amusd-ranks-")
        self.meeting = Meeting(address=folder, failure=self.failure, stop=self.stop)
        self._lock = threading.Lock()
        self._lives: dict[int, Lives] = {}
        settings = {"config": to_mapping(config), "cores": allowed_cores(), "address": folder}
        for rank in range(1, config.target_tensor_parallel_size):
            lives = self._lives[rank] = Lives(command_of(__name__))
            lives.prepare(settings)
            lives.start({"rank": rank})

    @property
    def pids(self) -> list[int]:
        """Their process ids, in the order of the ranks."""
        with self._lock:
            return [pid for lives in self._lives.values() if (pid := lives.pid) is not None]

    def failure(self, rank: int, timeout: float) -> RankLostError | None:
        """Why one of them has ended; None if not within `timeout` seconds."""
        with self._lock:
            end = self._lives[rank].ended(timeout)
        if end is None or end.code == 0:
            return None
        how = f"failed with exit code {end.code}, for the reason above"
        if end.code < 0:
            how = f"was killed by signal {-end.code}"
        return RankLostError(f"rank {rank} of the target (pid {end.pid}) {how}")

    def stop(self) -> None:
        """End them. Idempotent."""
        with self._lock:
            for lives in self._lives.values():
                lives.close()
        shutil.rmtree(self.meeting.address, ignore_errors=True)


def main() -> None:
    """The child's whole life."""
    ignore_terminal()
    sys.exit(serve(lambda _settings: None, _live))


def _live(channel: Channel, settings: Orders, orders: Orders, _prepared: object) -> int:
    folder, rank = settings["address"], orders["rank"]

    def leave() -> NoReturn:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)  # torch would take a second to leave

    channel.on_hang_up(leave)
    config = from_mapping(EngineConfig, settings["config"])
    if device_of(config, Role.TARGET, rank) == "cpu":
        pin_rank(config, Role.TARGET, settings["cores"], rank)
    from amusd.runtime.startup import run_follower

    run_follower(config, rank, Meeting(address=folder))
    channel.await_hang_up()
    leave()
