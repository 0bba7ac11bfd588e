"""The source of a target's drafts: a process started here, or a server started elsewhere.

This module is also the entry point of the draft's process. On a CPU a fork server loads the models once and forks a
draft for each session (`amusd/child.py`), so a lost draft is replaced within a tenth of a second.
"""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from amusd.child import Ended, ForkServer, Orders, command_of, serve
from amusd.config import EngineConfig
from amusd.errors import ConfigError
from amusd.logs import logger, show_lines
from amusd.runtime.cores import allowed_cores, cores_for, pin_to
from amusd.runtime.devices import device_of, link_devices
from amusd.settings import from_mapping, to_mapping
from amusd.transport.base import Link
from amusd.transport.factory import connect, link_address

DRAFT = "the draft's process"
STOP_SECONDS = 1.0
"""How long a draft may take to end before it is killed."""
LOOK_SECONDS = 0.1
NOT_LOADED, USERS_MISTAKE, TOLD, FAILED = 1, 2, 3, 4
"""Exit codes of a draft. 1, 2: it could not begin, and printed why. 3: the target knows why, or is gone. 4: other."""


class DraftProcess:
    """A draft's process, as seen by the process that starts it. Any thread may call `kill` and `stop`."""

    _end_is_news = True
    """Whether to log a kill of the present draft."""

    def __init__(self, config: EngineConfig, address: str, cores: Sequence[int] = (), *, is_own: bool) -> None:
        """Start the first draft, which loads and then listens at `address`. Does not wait.

        `cores`: the draft's cores on a CPU, by default the last of this process. `is_own`: for one run's target only,
        else for any target. A draft shows log lines if this process does.
        """
        size = config.target_tensor_parallel_size
        own_cores = cores or cores_for("draft", allowed_cores(), config.hardware, num_target_ranks=size)
        settings = {
            "config": to_mapping(config),
            "address": address,
            "is_own": is_own,
            "cores": sorted(own_cores),  # found before the target is pinned to its own
            "shows_lines": logger.isEnabledFor(logging.INFO),
        }
        self._server = ForkServer(command_of(__name__), settings)
        self._start()

    def start_next(self) -> bool:
        """Start the next draft, without waiting; False while the one before has not ended."""
        if (end := self.ended(0.0)) is None:
            return False
        self._start(end.code)
        return True

    def ended(self, timeout: float, /) -> Ended | None:
        """How the present draft ended; None if not within `timeout` seconds (0 polls)."""
        end = self._server.ended(timeout)
        if end is not None and end.code < 0 and self._end_is_news:
            self._end_is_news = False
            logger.warning("%s", end.in_words(DRAFT))
        return end

    def kill(self) -> None:
        """End the present draft, without waiting."""
        if self.ended(0.0) is None:
            self._end_is_news = False
            self._server.kill()

    def stop(self) -> None:
        """End the draft and its server, by force after `STOP_SECONDS`. Idempotent."""
        self._end_is_news = False  # a signal may end both processes, and that is no loss
        self.ended(0.0 if self._server.is_preparing else STOP_SECONDS)  # a loading draft does not see its link end
        self._server.kill()
        self._server.close()

    def keep_running(self, is_over: Callable[[], bool] = lambda: False) -> int:
        """Start the next draft whenever one ends, until `is_over`; return the exit code."""
        try:
            while not is_over():
                if (end := self.ended(LOOK_SECONDS)) is not None:
                    if end.code in (NOT_LOADED, USERS_MISTAKE):  # it has said why
                        return end.code
                    self.start_next()
        finally:
            self.kill()
            self.stop()
        return 0

    def _start(self, last_code: int | None = None) -> None:
        self._end_is_news = True
        self._server.start({"last_code": last_code})


class DraftSource:
    """The drafts at one address, one at a time. Safe for several threads."""

    process: DraftProcess | None = None
    """The draft's process, if it was started here."""

    def __init__(self, config: EngineConfig, address: str | None = None, cores: Sequence[int] = ()) -> None:
        """`address`: of a server started elsewhere; None: start a draft here, without waiting.

        `cores`: as in `DraftProcess`. Raises `ConfigError`.
        """
        self.can_repeat = config.transport.kind not in ("gloo", "nccl")  # these make no second link
        self._transport, self._devices = config.transport, ("", "") if self.can_repeat else link_devices(config)
        with ExitStack() as running:
            if address is None:
                address = running.enter_context(link_address(self._transport, self._devices))
                self.process = DraftProcess(config, address, cores, is_own=True)
                running.callback(self.process.stop)
            self._running = running.pop_all()
        self._address = address

    @property
    def is_here(self) -> bool:
        """Whether the drafts are on this machine, so that they can record events in the target's run directory."""
        return self.process is not None or not self._address.startswith("tcp://")

    def start(self) -> bool:
        """Start the next draft, without waiting; False while the one before has not ended."""
        return self.process is None or self.process.start_next()

    def connect(self) -> Link | None:
        """A new link to the draft, with a new nonce; None if the draft does not listen yet. Raises `ConfigError`."""
        return connect(self._transport, self._address, secrets.randbits(64), self._devices)

    def ended(self, timeout: float) -> Ended | None:
        """How the present draft ended; None if not within `timeout` seconds (0 polls), or not started here."""
        return None if self.process is None else self.process.ended(timeout)

    def drop(self) -> None:
        """Kill the present draft if it was started here. Does not wait."""
        if self.process is not None:
            self.process.kill()

    def stop(self) -> None:
        """End the draft if it was started here. Idempotent."""
        self._running.close()


def main() -> None:
    """Entry point of the process that `DraftProcess` starts."""
    sys.exit(serve(_prepare, _draft))


def _prepare(settings: Orders) -> Any:
    """Load what all drafts share; None if each draft loads for itself."""
    config = from_mapping(EngineConfig, settings["config"])
    if settings["shows_lines"]:
        show_lines()
    if device_of(config, "draft") == "cpu":
        pin_to(set(settings["cores"]))  # before torch is imported
    from amusd.runtime import draft_server

    return draft_server.prepare(config)


def _draft(settings: Orders, orders: Orders, prepared: Any) -> int:
    from amusd.runtime.draft_server import DraftServer

    config = from_mapping(EngineConfig, settings["config"])
    try:
        return DraftServer(config, settings["address"], settings["is_own"], orders["last_code"]).run(prepared)
    except ConfigError as error:
        logger.error("%s", error)
        return USERS_MISTAKE
