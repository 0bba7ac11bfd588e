"""Replaces a lost draft by the next one while the target goes on decoding: nothing here waits.

    lost ──▶ a new process waits ──▶ listen on a fresh link, tell it where ──▶ Hello ──▶ handed to the target worker

Every life of the draft has an incarnation, a link and a nonce of its own, so nothing of an earlier one can be taken for
its own. Lives that end before a candidate of theirs was accepted are counted: after `MAX_RESTARTS` in a row the target
stays alone for good. Whatever goes wrong on the way to the next draft costs that draft, never the target.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from amusd.errors import ConfigError, PeerLostError, PeerProtocolError, first_line
from amusd.protocol.messages import Hello
from amusd.runtime.handshake import Handshake
from amusd.transport.base import Rendezvous, Transport

FIRST_INCARNATION = 1
MAX_RESTARTS = 5
"""Most lives in a row that end before a candidate of theirs was accepted."""
BACK_OFF_SECONDS = 0.25
"""Pause before the second of these lives; twice as long before each further one."""
LOOK_SECONDS = 0.05
"""Time between two looks whether a process waits."""
FAREWELL_SECONDS = 1.0
"""How long a lost draft may take to end by itself, so that one that has failed shows its traceback."""


class DraftSource(Protocol):
    """Starts drafts: this process, or the launcher. Each process has an incarnation, one more than the last."""

    def newest(self) -> int:
        """Incarnation of the newest draft process that there is, or that could be started now. Does not wait.

        Raises `PeerLostError` when no other one can come.
        """
        ...

    def ending(self, timeout: float, /) -> str | None:
        """How the process that was told last has ended, as one line, if it has within `timeout` seconds (0 polls).

        None also where that cannot be known. Raises `PeerLostError` as `newest`.
        """
        ...

    def tell(self, incarnation: int, rendezvous: Rendezvous | None) -> None:
        """Tell the newest draft where the target listens; None: it and those behind it are not wanted."""
        ...

    def met(self) -> None:
        """The process that was told last has said Hello."""
        ...

    def dismiss(self) -> None:
        """End the present process, if it is still there: its link is closed. Does not wait."""
        ...


class DraftRestart:
    """The target's search for the next draft. `listen` makes the listening end of a link from a nonce."""

    def __init__(
        self, source: DraftSource, listen: Callable[[int], Transport], own: Hello, timeout_seconds: float
    ) -> None:
        self.failure: str | None = None
        """Why no further draft is looked for; None while one is."""
        self._source = source
        self._listen = listen
        self._own = own
        self._timeout_seconds = timeout_seconds
        self._told = FIRST_INCARNATION
        self._handshake: Handshake | None = None
        self._num_fruitless = 0
        self._not_before = 0.0
        self._next_look = 0.0
        self._dismiss_at = math.inf

    def lost(self, reason: str) -> None:
        """The present draft is gone, or is to go."""
        self._dismiss_at = time.monotonic() + FAREWELL_SECONDS
        self._fail(reason)

    def accepted(self) -> None:
        """A candidate of the present draft was accepted: it is worth replacing."""
        self._num_fruitless = 0

    def poll(self) -> tuple[Transport, Hello] | None:
        """A draft that has said Hello, with its link; None while there is none."""
        try:
            self._invite()
            peer = None if self._handshake is None else self._handshake.receive(0.0)
            if peer is not None:
                if peer.incarnation != self._told:
                    raise PeerProtocolError(f"incarnation {peer.incarnation} came in the place of {self._told}")
                self._source.met()
        except ConfigError as error:
            self._give_up(f"the draft that was to replace it is refused: {error}")
            return None
        except Exception as error:  # noqa: BLE001 - the target goes on, whatever it is
            self._fail(first_line(error))
            return None
        if peer is None:
            return None
        assert self._handshake is not None
        link, self._handshake = self._handshake.link, None
        return link, peer

    def close(self) -> None:
        """Stop looking. Idempotent."""
        self._give_up("the engine is closed")

    def _invite(self) -> None:
        now = time.monotonic()
        if now >= self._dismiss_at:
            self._dismiss_at = math.inf
            self._source.dismiss()
        if self.failure is not None or now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        try:
            newest = self._source.newest()
        except PeerLostError as error:
            self._give_up(str(error))
            return
        if newest <= self._told:
            return
        if self._handshake is not None:
            raise PeerLostError(self._source.ending(0.0) or "the draft ended before it was ready")
        if now < self._not_before:
            return
        nonce = secrets.randbits(64)
        try:
            link = self._listen(nonce)
        except ConfigError as error:  # the address of the former link may still be taken
            raise PeerLostError(str(error)) from error
        self._told, self._dismiss_at = newest, math.inf
        try:
            self._handshake = Handshake(link, self._own, self._timeout_seconds)
        except Exception:
            link.close()
            raise
        self._source.tell(newest, Rendezvous(link.address, nonce))

    def _fail(self, reason: str) -> None:
        self._drop()
        if self.failure is not None:
            return
        self._num_fruitless += 1
        if self._num_fruitless > MAX_RESTARTS:
            self._give_up(f"{MAX_RESTARTS} restarts in a row brought no accepted candidate; at last: {reason}")
        elif self._num_fruitless > 1:
            self._not_before = time.monotonic() + BACK_OFF_SECONDS * 2 ** (self._num_fruitless - 2)

    def _give_up(self, reason: str) -> None:
        self._drop()
        if self.failure is None:
            self.failure = reason
            with suppress(Exception):
                self._source.tell(self._told + 1, None)

    def _drop(self) -> None:
        if self._handshake is not None:
            self._handshake.link.close()
            self._handshake = None
