"""The target's other ranks on one machine: child processes that repeat the first one's passes (`ranks.py`)."""

from __future__ import annotations

import shutil
import tempfile
import threading

from amusd.child import Lives, Orders, command_of, serve
from amusd.config import EngineConfig
from amusd.errors import RankLostError
from amusd.models.meeting import Meeting
from amusd.runtime.cores import allowed_cores, pin_rank
from amusd.runtime.devices import device_of
from amusd.settings import from_mapping, to_mapping
from amusd.types import Role


class Followers(Meeting):
    """The processes of the target's ranks 1 and up; for several threads."""

    def __init__(self, config: EngineConfig) -> None:
        """Start them; does not wait."""
        super().__init__(tempfile.mkdtemp(prefix="amusd-ranks-"))
        self._lock = threading.Lock()
        self._lives: list[Lives] = []
        settings = {"config": to_mapping(config), "cores": allowed_cores(), "address": self.address}
        for rank in range(1, config.target_tensor_parallel_size):
            self._lives.append(Lives(command_of(__name__), settings))
            self._lives[-1].start({"rank": rank})

    @property
    def pids(self) -> list[int]:
        """See `Meeting`."""
        with self._lock:
            return [lives.pid for lives in self._lives]

    def failure(self, rank: int, timeout: float, /) -> RankLostError | None:
        """See `Meeting`."""
        with self._lock:
            end = self._lives[rank - 1].ended(timeout)
        return RankLostError(end.in_words(f"rank {rank} of the target")) if end is not None and end.code else None

    def stop(self) -> None:
        """See `Meeting`."""
        with self._lock:
            for lives in self._lives:
                lives.close()
        shutil.rmtree(self.address, ignore_errors=True)


def main() -> None:
    """The child's whole life."""
    serve(lambda _settings: None, _live, _leave)


def _live(settings: Orders, orders: Orders, _prepared: object) -> int:
    config, rank = from_mapping(EngineConfig, settings["config"]), orders["rank"]
    if device_of(config, Role.TARGET, rank) == "cpu":
        pin_rank(config, Role.TARGET, settings["cores"], rank)
    from amusd.runtime.startup import run_follower

    run_follower(config, rank, Meeting(settings["address"]))
    threading.Event().wait()  # for `_leave`, since torch would take a second to leave
    return 0


def _leave(settings: Orders) -> None:
    if settings:
        shutil.rmtree(settings["address"], ignore_errors=True)
