"""The target's other ranks on a machine: child processes that repeat the first one's passes (`models/ranks.py`).

The target's process starts them, or another one of the launcher. They end with the process that has started them.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

from amusd.child import Channel, Lives, Orders, command_of, ignore_terminal, serve
from amusd.config import EngineConfig
from amusd.errors import ConfigError, PeerFailedError, RankLostError, first_line
from amusd.runtime.cores import pin_rank
from amusd.runtime.devices import device_of
from amusd.settings import from_mapping, to_mapping
from amusd.transport.base import Rendezvous
from amusd.types import Role

WORK = "amusd.runtime.startup"
"""The module with the functions that child processes run."""
_USERS_MISTAKE = 2
_LOOK_SECONDS = 0.02


class Followers:
    """The processes of the target's ranks 1 and up, if it has several. May be asked from several threads."""

    def __init__(self, tell_loss: Callable[[str], None]) -> None:
        """`tell_loss` gets one line for each that somebody else has killed."""
        self._tell_loss = tell_loss
        self._lock = threading.RLock()
        self._lives: dict[int, Lives] = {}
        self._are_started = False
        self._told: set[int] = set()
        """Ranks whose end is no loss, or was told."""

    @property
    def pids(self) -> list[int]:
        """Their process ids, in the order of the ranks."""
        with self._lock:
            return [pid for lives in self._lives.values() if (pid := lives.pid) is not None]

    def prepare(
        self,
        config: EngineConfig,
        cores: Sequence[int],
        work: str | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Start them, before it is known where they meet; does not wait.

        `cores`: those of the machine, of which each takes its own. `work`: a module with `run_follower` in place of
        amusd's own (the launcher's tests). `ranks`: which ones are here; None: all but the first.
        """
        with self._lock:
            for rank in range(1, config.target_tensor_parallel_size) if ranks is None else ranks:
                lives = self._lives[rank] = Lives(command_of(__name__), is_quiet=True)
                lives.prepare(
                    {
                        "config": to_mapping(config),
                        "rank": rank,
                        "cores": list(cores),
                        "work": work or WORK,
                    }
                )

    def meet(self, rendezvous: Rendezvous) -> None:
        """`start`, where the target has other ranks."""
        if rendezvous.ranks is not None:
            self.start(rendezvous.ranks)

    def start(self, address: str) -> None:
        """Tell them where the first rank awaits them; does not wait."""
        with self._lock:
            self._are_started = True
            for lives in self._lives.values():
                lives.start({"address": address})

    def failure(self, timeout: float = 0.0) -> ConfigError | PeerFailedError | RankLostError | None:
        """Why the first rank cannot go on, once one of them has failed; None when none has within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (found := self._failure()) is None and self._lives and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        return found

    def await_end(self) -> ConfigError | PeerFailedError | RankLostError | None:
        """Wait until all have ended; return why one has failed, at once, or None."""
        while (found := self._failure()) is None and not self._are_over:
            time.sleep(_LOOK_SECONDS)
        return found

    @property
    def _are_over(self) -> bool:
        with self._lock:
            return all(lives.ended(0.0) is not None for lives in self._lives.values())

    def _failure(self) -> ConfigError | PeerFailedError | RankLostError | None:
        with self._lock:
            for rank, lives in self._lives.items():
                end = lives.ended(0.0)
                if end is None or end.code == 0:
                    continue
                own = f"rank {rank} of the target"
                if end.code < 0:
                    if rank not in self._told:
                        self._told.add(rank)
                        self._tell_loss(f"{own} (pid {end.pid}) was killed by signal {-end.code}")
                    return RankLostError(f"{own} is gone")
                if end.code == _USERS_MISTAKE and end.said:
                    return ConfigError(end.said)
                return PeerFailedError(f"{own} failed: {end.said or f'exit code {end.code}, for the reason above'}")
        return None

    def stop(self, patience: float) -> None:
        """End them. Those that have been started have `patience` seconds to end by themselves. Idempotent."""
        deadline = time.monotonic() + patience
        with self._lock:
            self._told.update(self._lives)
            for lives in self._lives.values():
                if not self._are_started or lives.ended(max(0.0, deadline - time.monotonic())) is None:
                    lives.kill()
            for lives in self._lives.values():
                lives.close()


def main() -> None:
    """The child's whole life."""
    ignore_terminal()
    sys.exit(serve(_prepare, _live))


def _prepare(settings: Orders) -> None:
    """Load what the work needs; the model is loaded where a failure can be reported."""
    config, rank = _parse(settings)
    if device_of(config, Role.TARGET, rank) == "cpu":
        pin_rank(config, Role.TARGET, settings["cores"], rank)
    importlib.import_module(settings["work"])


def _live(channel: Channel, settings: Orders, orders: Orders, _prepared: object) -> int:
    """Compute until the first rank ends; return the exit code. Tells the parent why it ends before that."""
    channel.on_hang_up(lambda: os._exit(0))  # nobody is left to work for
    try:
        importlib.import_module(settings["work"]).run_follower(*_parse(settings), orders["address"])
    except Exception as error:
        channel.say(first_line(error))
        if isinstance(error, ConfigError):
            return _USERS_MISTAKE
        raise
    return 0


def _parse(settings: Orders) -> tuple[EngineConfig, int]:
    return from_mapping(EngineConfig, settings["config"]), settings["rank"]
