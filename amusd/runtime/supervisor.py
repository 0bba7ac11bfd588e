"""Starts, replaces and ends the draft as a child process of the target's: how `Engine.launch` makes a pair from Python.

Where it can, the child loads the draft once and forks a process for each of its lives (`amusd.child`), so that one that
is lost is replaced within a tenth of a second. All of them end with the process that has started the child.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from amusd.child import command_of
from amusd.child.fork_server import Channel, Orders, serve
from amusd.child.lives import Ended, Lives
from amusd.config import EngineConfig
from amusd.drafters.factory import LoadedDrafters
from amusd.errors import ConfigError, PeerLostError
from amusd.runtime.cores import allowed_cores, cores_for, pin_to
from amusd.runtime.devices import device_of
from amusd.runtime.startup import make_recorder, prepare_draft, serve_draft
from amusd.settings import from_mapping, to_mapping
from amusd.transport.base import Rendezvous
from amusd.types import Role

STOP_SECONDS = 2.0
"""How long a draft may take to end by itself before it is killed."""
_TARGET_GONE, _USERS_MISTAKE = 1, 2
"""Exit codes of a draft whose end the target explains."""


class DraftProcess:
    """One child process that drafts, at a time. Satisfies `DraftSource`."""

    def __init__(self, config: EngineConfig, run_directories: Sequence[Path] = ()) -> None:
        """`run_directories`: where the draft keeps its events, one for each run; none: nowhere."""
        self._config = config
        self._run_directories = [str(directory.absolute()) for directory in run_directories]
        self._lives = Lives(command_of(__name__), is_quiet=True)
        self._incarnation = 0
        self._has_met = False

    @property
    def pid(self) -> int | None:
        """Process id of the newest draft, or of the process that prepares for the first one; None before that."""
        return self._lives.pid

    def newest(self) -> int:
        """The draft that runs; one more once it has ended.

        Raises `PeerLostError` where it ended by itself before any draft was ready: so would the next one.
        """
        end = self._lives.ended(0.0)
        if end is not None and end.code >= 0 and not self._has_met:
            raise PeerLostError(_in_words(end))
        return self._incarnation + (self._incarnation == 0 or end is not None)

    def ending(self, timeout: float, /) -> str | None:
        """See `DraftSource`."""
        end = self._lives.ended(timeout)
        return None if end is None else _in_words(end)

    def tell(self, incarnation: int, rendezvous: Rendezvous | None) -> None:
        """Start the draft; does not wait for it. Its standard error is the caller's."""
        if rendezvous is None:
            return
        self._end()  # it has ended, unless it is the first
        self._incarnation = incarnation
        self._lives.start(
            {
                "config": to_mapping(self._config),
                "rendezvous": asdict(rendezvous),
                "incarnation": incarnation,
                "run_directories": self._run_directories,
            }
        )

    def met(self) -> None:
        """See `DraftSource`."""
        self._has_met = True

    def dismiss(self) -> None:
        """Kill the draft; `newest` tells when it has ended."""
        self._lives.kill()

    def stop(self) -> None:
        """End the draft, and what it was forked from: wait for its own end, else kill it. Idempotent."""
        self._end()
        self._lives.close()

    def _end(self) -> None:
        if self._lives.ended(STOP_SECONDS) is None:
            self._lives.kill()
            self._lives.ended(STOP_SECONDS)


def _in_words(end: Ended) -> str:
    who = f"the draft's process (pid {end.pid})"
    if end.code < 0:
        return f"{who} was killed by signal {-end.code}; if nobody sent it, see whether the memory is enough for both"
    return f"{who} ended with exit code {end.code}; mend what it says on standard error, and start again"


def main() -> None:
    """The child's whole life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the parent, which ends this process
    sys.exit(serve(_prepare, _live))


def _prepare(orders: Orders) -> LoadedDrafters | None:
    config = from_mapping(EngineConfig, orders["config"])
    if device_of(config, Role.DRAFT) == "cpu":
        pin_to(cores_for(Role.DRAFT, allowed_cores(), config.hardware))
    return prepare_draft(config)


def _live(channel: Channel, orders: Orders, prepared: LoadedDrafters | None) -> int:
    channel.on_hang_up(lambda: os._exit(0))  # nobody is left to work for
    config = from_mapping(EngineConfig, orders["config"])
    rendezvous = Rendezvous(**orders["rendezvous"])
    recorder = make_recorder(Role.DRAFT, [Path(directory) for directory in orders["run_directories"]])
    try:
        serve_draft(config, rendezvous, recorder, orders["incarnation"], drafters=prepared)
    except ConfigError:
        return _USERS_MISTAKE  # the target has been told, and says so
    except PeerLostError:
        return _TARGET_GONE  # which says why
    return 0
