"""The draft's process: the target's end, which starts, replaces and ends it, and its own.

Where possible a server process loads what drafts need once and forks each draft (`amusd/child.py`), so that a lost one
is replaced within a tenth of a second.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from amusd.child import Ended, ForkServer, Orders, command_of, serve
from amusd.config import EngineConfig
from amusd.errors import ConfigError, PeerLostError
from amusd.files import keep_traceback
from amusd.logs import logger, show_lines
from amusd.runtime.cores import allowed_cores, cores_for, pin_to
from amusd.runtime.devices import device_of, link_devices
from amusd.runtime.draft_restart import DRAFT
from amusd.runtime.handshake import failure_report
from amusd.settings import from_mapping, to_mapping
from amusd.tracing.recorder import Recorder
from amusd.transport.factory import connect

STOP_SECONDS = 1.0
"""How long a draft may take to end before it is killed."""
_FAILED, _USERS_MISTAKE, _TARGET_GONE = 1, 2, 3
"""Exit codes of a draft that ends before its target has."""


class DraftProcess:
    """A process that drafts. Satisfies `DraftSource`; for several threads."""

    def __init__(self, config: EngineConfig, events: str | None = None, cores: Sequence[int] = ()) -> None:
        """Have the first draft load, without waiting. `events`: as of `Recorder`.

        `cores`: of the draft on a CPU; empty: the last ones of this process. Drafts show their lines if this process
        does.
        """
        size = config.target_tensor_parallel_size
        own_cores = cores or cores_for("draft", allowed_cores(), config.hardware, num_target_ranks=size)
        self._settings = {
            "config": to_mapping(config),
            "events": events,
            "cores": sorted(own_cores),  # found before the target keeps to its own
            "shows_lines": logger.isEnabledFor(logging.INFO),
        }
        self._server = ForkServer(command_of(__name__), self._settings)
        self._lock = threading.RLock()
        self._is_dismissed = False
        self._last_end: Ended | None = None

    @property
    def pid(self) -> int:
        """Process id of the newest draft, or of the process that prepares for it."""
        with self._lock:
            return self._server.pid

    def tell(self, incarnation: int, address: str, nonce: int) -> None:
        """See `DraftSource`."""
        with self._lock:
            self._is_dismissed = False
            if self._server.is_over:
                self._server.close()
                self._server = ForkServer(command_of(__name__), self._settings)
            has_failed = self._last_end is not None and self._last_end.code == _FAILED
            orders = {"address": address, "nonce": nonce, "incarnation": incarnation, "has_failed": has_failed}
            self._server.start(orders)

    def ending(self, timeout: float, /) -> Ended | None:
        """See `DraftSource`."""
        with self._lock:
            end = self._server.ended(timeout)
            if end is not None and end is not self._last_end:
                self._last_end = end
                if end.code < 0 and not self._is_dismissed:
                    logger.warning("%s", end.in_words(DRAFT))
            return end

    def dismiss(self) -> None:
        """See `DraftSource`."""
        with self._lock:
            if self.ending(0.0) is None:
                self._is_dismissed = True
                self._server.kill()

    def stop(self) -> None:
        """End the draft and its server, by force after `STOP_SECONDS`. Idempotent."""
        self._is_dismissed = True  # what ends this process may end the draft, too, and that is no loss
        with self._lock:
            if self.ending(0.0 if self._server.is_preparing else STOP_SECONDS) is None:  # what loads sees no link end
                self._server.kill()
            self._server.close()


def main() -> None:
    """Be the process that `DraftProcess` starts."""
    sys.exit(serve(_prepare, _draft))


def _prepare(settings: Orders) -> Any:
    """Load what all drafts share; returns it, or None where each draft loads for itself."""
    config = from_mapping(EngineConfig, settings["config"])
    if settings["shows_lines"]:
        show_lines()
    if device_of(config, "draft") == "cpu":
        pin_to(set(settings["cores"]))  # before there is torch
    from amusd.runtime import startup

    return startup.prepare_draft(config)


def _draft(settings: Orders, orders: Orders, prepared: Any) -> int:
    """Draft until the target is done; return the exit code. Whatever goes wrong is reported to the target.

    The traceback of an error is shown unless the draft before has failed, too.
    """
    from amusd.runtime import startup

    config = from_mapping(EngineConfig, settings["config"])
    recorder = Recorder("draft", settings["events"])
    try:
        link = connect(config.transport, orders["address"], orders["nonce"], link_devices(config))
    except ConfigError as error:
        logger.error("%s", error)
        return _USERS_MISTAKE
    try:
        startup.serve_draft(config, link, recorder, orders["incarnation"], prepared)
    except Exception as error:
        with suppress(PeerLostError):  # the target must hear the reason, not only that the link went dead
            link.send(failure_report(error))
        recorder.flush()
        codes = {ConfigError: _USERS_MISTAKE, PeerLostError: _TARGET_GONE}
        code = next((code for kind, code in codes.items() if isinstance(error, kind)), _FAILED)
        runs_users_code = any(drafter.factory is not None for drafter in config.drafters)
        has_traceback = code == _FAILED or (runs_users_code and error.__cause__ is not None)
        if has_traceback and recorder.folder is not None:
            keep_traceback(recorder.folder.parent, "draft", error)
        if code == _FAILED and not orders["has_failed"]:
            raise
        return code
    finally:
        link.close()
    return 0
