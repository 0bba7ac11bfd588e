"""Where a target's drafts come from: a process that it starts, or a server that was started elsewhere."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack

from amusd.child import Ended
from amusd.config import EngineConfig
from amusd.runtime.devices import link_devices
from amusd.runtime.draft_process import DraftProcess
from amusd.transport.base import Link
from amusd.transport.factory import connect, link_address


class DraftSource:
    """Drafts at one address, one at a time, to which a target connects. Safe for several threads."""

    process: DraftProcess | None = None
    """The draft's process, if it was started here."""

    def __init__(self, config: EngineConfig, address: str | None = None, cores: Sequence[int] = ()) -> None:
        """`address`: that of a server started elsewhere; None: start a draft here, without waiting.

        `cores`: as in `DraftProcess`. Raises `ConfigError`.
        """
        self.can_repeat = config.transport.kind not in ("gloo", "nccl")  # which make no second link
        self._config = config
        with ExitStack() as running:
            if address is None:
                address = running.enter_context(link_address(config.transport, self._devices))
                self.process = DraftProcess(config, address, cores, is_own=True)
                running.callback(self.process.stop)
            self._running = running.pop_all()
        self._address = address

    @property
    def _devices(self) -> tuple[str, str]:
        return ("", "") if self.can_repeat else link_devices(self._config)

    @property
    def is_here(self) -> bool:
        """Whether the drafts are on this machine, so that they can record events in the target's run directory."""
        return self.process is not None or not self._address.startswith("tcp://")

    def start(self) -> bool:
        """Start the next draft, without waiting; False while the one before has not ended."""
        return self.process is None or self.process.start_next()

    def connect(self) -> Link | None:
        """A new link to the draft, with a new nonce; None if the draft does not listen yet. Raises `ConfigError`."""
        return connect(self._config.transport, self._address, secrets.randbits(64), self._devices)

    def ended(self, timeout: float) -> Ended | None:
        """How the present draft ended; None if not within `timeout` seconds (0 polls), or if it is not a child."""
        return None if self.process is None else self.process.ended(timeout)

    def drop(self) -> None:
        """Kill the present draft if it was started here. Does not wait."""
        if self.process is not None:
            self.process.kill()

    def stop(self) -> None:
        """End the draft if it was started here. Idempotent."""
        self._running.close()
