"""The target's other ranks on one machine: child processes that repeat the first one's passes (`models/ranks.py`).

They end with the process that has started them.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

from amusd.child import Channel, Lives, Orders, command_of, ignore_terminal, serve
from amusd.config import EngineConfig
from amusd.errors import PeerFailedError, RankLostError
from amusd.models.meeting import Meeting
from amusd.runtime.cores import allowed_cores, pin_rank
from amusd.runtime.devices import device_of
from amusd.settings import from_mapping, to_mapping
from amusd.types import Role

WORK = "amusd.runtime.startup"
"""The module with the functions that child processes run."""
STOP_SECONDS = 1.0
"""How long they may take to end by themselves before they are killed."""
_LOOK_SECONDS = 0.02


class Followers:
    """The processes of the target's ranks 1 and up. May be asked from several threads."""

    def __init__(self, config: EngineConfig, cores: Sequence[int] | None = None, work: str | None = None) -> None:
        """Start them; does not wait.

        `cores`: those of the machine, of which each takes its own; None: all that this process may use. `work`: a
        module with `run_follower` in place of amusd's own (tests).
        """
        folder = tempfile.mkdtemp(prefix="amusd-ranks-")
        self.meeting = Meeting(address=folder, failure=self.failure, stop=self.stop)
        """Where they await the first rank."""
        self._lock = threading.RLock()
        self._is_stopped = False
        self._lives: dict[int, Lives] = {}
        for rank in range(1, config.target_tensor_parallel_size):
            lives = self._lives[rank] = Lives(command_of(__name__), is_quiet=True)
            lives.prepare(
                {
                    "config": to_mapping(config),
                    "rank": rank,
                    "cores": list(cores or allowed_cores()),
                    "work": work or WORK,
                    "address": folder,
                }
            )
            lives.start({})

    @property
    def pids(self) -> list[int]:
        """Their process ids, in the order of the ranks."""
        with self._lock:
            return [pid for lives in self._lives.values() if (pid := lives.pid) is not None]

    def failure(self, timeout: float = 0.0) -> PeerFailedError | RankLostError | None:
        """Why one of them has ended before it was stopped; None when none has within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (found := self._failure()) is None and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        return found

    def _failure(self) -> PeerFailedError | RankLostError | None:
        with self._lock:
            for rank, lives in self._lives.items():
                end = None if self._is_stopped else lives.ended(0.0)
                if end is None or end.code == 0:
                    continue
                who = f"rank {rank} of the target (pid {end.pid})"
                if end.code < 0:
                    return RankLostError(f"{who} was killed by signal {-end.code}")
                return PeerFailedError(f"{who} failed with exit code {end.code}, for the reason above")
        return None

    def stop(self) -> None:
        """End them; they have `STOP_SECONDS` to end by themselves. Idempotent."""
        deadline = time.monotonic() + STOP_SECONDS
        with self._lock:
            self._is_stopped = True
            for lives in self._lives.values():
                if lives.ended(max(0.0, deadline - time.monotonic())) is None:
                    lives.kill()
            for lives in self._lives.values():
                lives.close()
        shutil.rmtree(self.meeting.address, ignore_errors=True)


def main() -> None:
    """The child's whole life."""
    ignore_terminal()
    sys.exit(serve(_prepare, _live))


def _prepare(settings: Orders) -> None:
    """Nothing is shared with a next life: there is none."""


def _live(channel: Channel, settings: Orders, _orders: Orders, _prepared: object) -> int:
    """Compute until the first rank ends, and end this process: torch would take a second to leave."""
    folder = settings["address"]

    def leave() -> NoReturn:
        shutil.rmtree(folder, ignore_errors=True)  # the first rank may have been killed
        os._exit(0)

    channel.on_hang_up(leave)
    config, rank = from_mapping(EngineConfig, settings["config"]), settings["rank"]
    if device_of(config, Role.TARGET, rank) == "cpu":
        pin_rank(config, Role.TARGET, settings["cores"], rank)
    importlib.import_module(settings["work"]).run_follower(config, rank, Meeting(address=folder))
    leave()
