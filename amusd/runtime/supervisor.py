"""Starts, replaces and ends the draft as a child process of the target's: from Python, and by the `amusd` command.

Where it can, the child loads the draft once and forks a process for each of its lives (`amusd.child`), so that one that
is lost is replaced within a tenth of a second. All of them end with the process that has started the child.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from amusd.child import Ended, Lives, command_of
from amusd.child.fork_server import Channel, Orders, ignore_terminal, serve
from amusd.config import EngineConfig
from amusd.errors import ConfigError, PeerFailedError, PeerLostError, first_line
from amusd.files import keep_traceback
from amusd.runtime.cores import allowed_cores, pin_rank
from amusd.runtime.devices import device_of
from amusd.runtime.followers import WORK, Followers
from amusd.settings import from_mapping, to_mapping
from amusd.transport.base import Rendezvous
from amusd.types import Role

STOP_SECONDS = 2.0
"""How long a draft may take to end by itself before it is killed."""
_FAILED, _USERS_MISTAKE, TARGET_GONE = 1, 2, 3
"""Exit codes of a draft that ends before its target has."""
_WARM = "warm"


class DraftProcess:
    """One child process that drafts, at a time. Satisfies `DraftSource`; may be asked from several threads."""

    def __init__(
        self,
        config: EngineConfig,
        run_directories: Sequence[Path] = (),
        *,
        work: str | None = None,
        tell_loss: Callable[[str], None] | None = None,
        lives: Lives | None = None,
        cores: Sequence[int] | None = None,
    ) -> None:
        """`run_directories`: where the draft keeps its events, one for each run; none: nowhere.

        `work`: a module with `prepare_draft` and `run_draft` in place of amusd's own (the launcher's tests).
        `tell_loss` gets one line for each draft that somebody else has killed; with it the draft itself says on
        standard error what it loads.
        `lives`: from `warm_lives`. `cores`: those of the machine, where this process keeps to some of them already.
        """
        self._settings = {
            "config": to_mapping(config),
            "run_directories": [str(directory.absolute()) for directory in run_directories],
            "work": work or WORK,
            "cores": list(cores or allowed_cores()),  # before the target keeps to its own
            "tells": tell_loss is not None,
        }
        self._lives = lives or Lives(command_of(__name__), is_quiet=True)
        self._lock = threading.RLock()
        self._incarnation = 0
        self._has_met = False
        self._is_dismissed = False
        """Whether this object has killed the newest draft."""
        self._tell_loss = tell_loss
        self._last_end: Ended | None = None
        self.followers = Followers(tell_loss or (lambda _line: None))
        """The target's other ranks that are looked after here, too; none unless they are prepared."""

    @property
    def pid(self) -> int | None:
        """Process id of the newest draft, or of the process that prepares for the first one; None before that."""
        with self._lock:
            return self._lives.pid

    @property
    def is_preparing(self) -> bool:
        """Whether the newest draft does not run yet."""
        return self._lives.is_preparing

    @property
    def exit_code(self) -> int | None:
        """The exit code of the newest draft; minus the signal that ended it; None while it runs."""
        end = self._ended(0.0)
        return None if end is None else end.code

    def prepare(self) -> None:
        """Have the first draft load before it is told where the target listens; does not wait."""
        with self._lock:
            self._lives.prepare(self._settings)

    def newest(self) -> int:
        """The draft that runs; one more once it has ended.

        Raises `PeerLostError` where it ended by itself before any draft was ready: so would the next one.
        """
        end = self._ended(0.0)
        if end is not None and end.code >= 0 and not self._has_met:
            raise PeerLostError(_in_words(end))
        return self._incarnation + (self._incarnation == 0 or end is not None)

    def ending(self, timeout: float, /) -> str | None:
        """See `DraftSource`."""
        end = self._ended(timeout)
        return None if end is None else _in_words(end)

    def start_failure(self) -> ConfigError | PeerFailedError | None:
        """Why no draft can start; None while one may, once one was ready, and where the link's end tells it."""
        end = None if self._has_met else self._ended(0.0)
        if end is None or end.code not in (_FAILED, _USERS_MISTAKE):
            return None
        if end.code == _USERS_MISTAKE and end.said:
            return ConfigError(end.said)
        reason = end.said or f"exit code {end.code}, for the reason above"
        return PeerFailedError(f"the draft worker could not start: {reason}")

    def tell(self, incarnation: int, rendezvous: Rendezvous | None) -> None:
        """Start the draft; does not wait for it. Its standard error is the caller's. `followers` are told, too."""
        if rendezvous is None:
            return
        self.followers.meet(rendezvous)
        if self._incarnation > 0:
            self._end(STOP_SECONDS)
        with self._lock:
            self._incarnation, self._is_dismissed = incarnation, False
            self._lives.prepare(self._settings)
            told = "" if self._last_end is None else self._last_end.said
            self._lives.start({"rendezvous": asdict(rendezvous), "incarnation": incarnation, "told": told})

    def met(self) -> None:
        """See `DraftSource`."""
        self._has_met = True

    def dismiss(self) -> None:
        """Kill the draft; `newest` tells when it has ended."""
        with self._lock:
            self._is_dismissed = self._lives.kill() or self._is_dismissed

    def stop(self, patience: float = STOP_SECONDS) -> None:
        """End the draft, and what it was forked from. Kill it if it has not ended in `patience` seconds. Idempotent."""
        self._is_dismissed = True  # what ends this process may end the draft, too, and that is no loss
        self._end(patience)
        with self._lock:
            self._lives.close()

    def _end(self, patience: float) -> None:
        if self._ended(0.0 if self._lives.is_preparing else patience) is None:  # what still loads sees no link end
            self.dismiss()
            self._ended(STOP_SECONDS)

    def _ended(self, timeout: float) -> Ended | None:
        with self._lock:
            end = self._lives.ended(timeout)
            if end is not None and end is not self._last_end:
                self._last_end = end
                if self._tell_loss is not None and end.code < 0 and not self._is_dismissed:
                    self._tell_loss(_in_words(end))
            return end


def warm_lives() -> Lives:
    """A process for a `DraftProcess` whose configuration is not known yet: it imports torch meanwhile."""
    lives = Lives([*command_of(__name__), _WARM], is_quiet=True)
    lives.open()
    return lives


def _in_words(end: Ended) -> str:
    who = f"the draft's process (pid {end.pid})"
    if end.code < 0:
        return f"{who} was killed by signal {-end.code}; if nobody sent it, see whether the memory is enough for both"
    if end.said:
        return f"{who} ends: {end.said}"
    return f"{who} ended with exit code {end.code}; mend what it says on standard error, and start again"


def main() -> None:
    """The child's whole life."""
    ignore_terminal()
    if _WARM in sys.argv:
        importlib.import_module(WORK)
    sys.exit(serve(_prepare, _live))


def _prepare(settings: Orders) -> Any:
    """Load what all lives share; returns it, or None where each life loads for itself."""
    config = from_mapping(EngineConfig, settings["config"])
    if settings["tells"]:
        log = logging.getLogger("amusd")
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)
    if device_of(config, Role.DRAFT) == "cpu":
        pin_rank(config, Role.DRAFT, settings["cores"])
    return importlib.import_module(settings["work"]).prepare_draft(config)


def _live(channel: Channel, settings: Orders, orders: Orders, prepared: Any) -> int:
    """Draft until the target is done; return the exit code. Tells the parent why it ends before that.

    The traceback of an error is shown unless the life before has ended with the same.
    """
    channel.on_hang_up(lambda: os._exit(0))  # nobody is left to work for
    rendezvous = Rendezvous(**orders["rendezvous"])
    directories = [Path(directory) for directory in settings["run_directories"]]
    run_draft = importlib.import_module(settings["work"]).run_draft
    config = from_mapping(EngineConfig, settings["config"])
    try:
        code: int = run_draft(config, directories, rendezvous, orders["incarnation"], prepared)
    except Exception as error:
        channel.say(first_line(error))
        code = _exit_code_of(error)
        runs_own_code = any(drafter.factory is not None for drafter in config.drafters)
        if code == _FAILED or (runs_own_code and error.__cause__ is not None):  # its author wants more than a line
            for directory in directories[:1]:
                keep_traceback(directory, Role.DRAFT.value, error)
        if code == _FAILED and first_line(error) != orders["told"]:
            raise
    return code


def _exit_code_of(error: Exception) -> int:
    if isinstance(error, ConfigError):
        return _USERS_MISTAKE
    return TARGET_GONE if isinstance(error, PeerLostError) else _FAILED
