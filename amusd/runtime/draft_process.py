"""The draft's process: the target's end, which starts, replaces and ends it, and its own.

Where possible a server process loads the draft once and forks each life of it (`amusd/child.py`), so that a lost draft
is replaced within a tenth of a second.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from amusd.child import Channel, Ended, Lives, Orders, command_of, ending_with_parent, ignore_terminal, serve
from amusd.config import EngineConfig
from amusd.errors import ConfigError, PeerLostError, first_line
from amusd.files import keep_traceback
from amusd.runtime.cores import allowed_cores, pin_rank
from amusd.runtime.devices import device_of
from amusd.settings import from_mapping, to_mapping
from amusd.transport.base import Rendezvous
from amusd.types import Role

STOP_SECONDS = 1.0
"""How long a draft may take to end before it is killed."""
_FAILED, _USERS_MISTAKE, _TARGET_GONE = 1, 2, 3
"""Exit codes of a draft that ends before its target has."""


class DraftProcess:
    """A process that drafts. Satisfies `DraftSource`; for several threads."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        events: str | None = None,
        tell_loss: Callable[[str], None] | None = None,
        on_met: Callable[[], None] | None = None,
    ) -> None:
        """Have the first draft load, without waiting. `events`: as of `make_recorder`.

        `tell_loss` gets a line for each draft that somebody else has killed, and has the draft say on standard error
        what it loads. `on_met` is called when a draft has said Hello; `pid` is its id by then.
        """
        self._settings = {
            "config": to_mapping(config),
            "events": events,
            "cores": allowed_cores(),  # before the target keeps to its own
            "tells": tell_loss is not None,
        }
        self._lives = Lives(command_of(__name__))
        self._lock = threading.RLock()
        self._tell_loss = tell_loss
        self._on_met = on_met
        self._has_met = False
        self._is_dismissed = False
        self._last_end: Ended | None = None
        self._lives.prepare(self._settings)

    @property
    def pid(self) -> int | None:
        """Process id of the newest draft, or of the process that prepares for it."""
        with self._lock:
            return self._lives.pid

    def tell(self, incarnation: int, rendezvous: Rendezvous) -> None:
        """See `DraftSource`. A draft that ends before any was ready is the last one."""
        with self._lock:
            last = self._last_end
            if last is not None and last.code >= 0 and not self._has_met:
                raise PeerLostError(_in_words(last))
            self._is_dismissed = False
            self._lives.prepare(self._settings)
            said_before = "" if last is None else last.said
            orders = {"rendezvous": asdict(rendezvous), "incarnation": incarnation, "said_before": said_before}
            self._lives.start(orders)

    def ending(self, timeout: float, /) -> str | None:
        """See `DraftSource`."""
        end = self._ended(timeout)
        if end is not None and end.code == _USERS_MISTAKE and end.said:
            raise ConfigError(end.said)
        return None if end is None else _in_words(end)

    def met(self) -> None:
        """See `DraftSource`."""
        self._has_met = True
        if self._on_met is not None:
            self._on_met()

    def dismiss(self) -> None:
        """See `DraftSource`."""
        with self._lock:
            if self._ended(0.0) is None:
                self._is_dismissed = True
                self._lives.kill()

    def stop(self) -> None:
        """End the draft and its server, by force after `STOP_SECONDS`. Idempotent."""
        self._is_dismissed = True  # what ends this process may end the draft, too, and that is no loss
        with self._lock:
            if self._ended(0.0 if self._lives.is_preparing else STOP_SECONDS) is None:  # what loads sees no link end
                self._lives.kill()
            self._lives.close()

    def _ended(self, timeout: float) -> Ended | None:
        with self._lock:
            end = self._lives.ended(timeout)
            if end is not None and end is not self._last_end:
                self._last_end = end
                if self._tell_loss is not None and end.code < 0 and not self._is_dismissed:
                    self._tell_loss(_in_words(end))
            return end


def _in_words(end: Ended) -> str:
    who = f"the draft's process (pid {end.pid})"
    if end.code < 0:
        return f"{who} was killed by signal {-end.code}; if nobody sent it, see whether the memory is enough for both"
    if end.said:
        return f"{who} ends: {end.said}"
    return f"{who} ended with exit code {end.code}; mend what it says on standard error, and start again"


def main() -> None:
    """Be the process that `DraftProcess` starts."""
    ignore_terminal()
    sys.exit(serve(_prepare, _live))


def _prepare(settings: Orders) -> Any:
    """Load what all lives share; returns it, or None where each life loads for itself."""
    config = from_mapping(EngineConfig, settings["config"])
    if settings["tells"]:
        log = logging.getLogger("amusd")
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)
    if device_of(config, Role.DRAFT) == "cpu":
        pin_rank(config, Role.DRAFT, settings["cores"])  # before there is torch
    with ending_with_parent():
        from amusd.runtime import startup

        return startup.prepare_draft(config)


def _live(channel: Channel, settings: Orders, orders: Orders, prepared: Any) -> int:
    """Draft until the target is done; return the exit code. Tells the parent why it ends before that.

    The traceback of an error is shown unless the life before has ended with the same.
    """
    from amusd.runtime import startup

    channel.on_hang_up(lambda: os._exit(0))  # nobody is left to work for
    config = from_mapping(EngineConfig, settings["config"])
    recorder = startup.make_recorder(Role.DRAFT, settings["events"])
    try:
        startup.serve_draft(config, Rendezvous(**orders["rendezvous"]), recorder, orders["incarnation"], prepared)
    except Exception as error:
        channel.say(first_line(error))
        code = _exit_code_of(error)
        recorder.flush()
        runs_own_code = any(drafter.factory is not None for drafter in config.drafters)
        has_traceback = code == _FAILED or (runs_own_code and error.__cause__ is not None)
        if has_traceback and recorder.folder is not None:
            keep_traceback(recorder.folder.parent, Role.DRAFT.value, error)
        if code == _FAILED and first_line(error) != orders["said_before"]:
            raise
        return code
    return 0


def _exit_code_of(error: Exception) -> int:
    if isinstance(error, ConfigError):
        return _USERS_MISTAKE
    return _TARGET_GONE if isinstance(error, PeerLostError) else _FAILED
