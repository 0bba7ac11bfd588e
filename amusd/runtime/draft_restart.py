"""Replaces a lost draft while the target goes on decoding: nothing here waits.

lost ──▶ its process has ended ──▶ listen on a fresh link, start the next one ──▶ Hello ──▶ handed to the target

Every draft has its own incarnation, link and nonce, so nothing of an earlier one is taken for its own. After
`MAX_RESTARTS` in a row without an accepted candidate, the target stays alone for good.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from typing import Protocol

from amusd.errors import ConfigError, PeerLostError, PeerProtocolError, first_line
from amusd.protocol.messages import Hello
from amusd.runtime.handshake import Handshake
from amusd.transport.base import Rendezvous, Transport

FIRST_INCARNATION = 1
MAX_RESTARTS = 5
BACK_OFF_SECONDS = 0.25
"""Pause before the second of these restarts; doubled for each further one."""
LOOK_SECONDS = 0.05
FAREWELL_SECONDS = 1.0
"""How long a lost draft may take to end, so that a failed one shows its traceback."""


class DraftSource(Protocol):
    """Starts drafts, one at a time: in a child process, or on another machine."""

    @property
    def pid(self) -> int | None:
        """Process id of the present draft, if it is on this machine."""
        ...

    def tell(self, incarnation: int, rendezvous: Rendezvous) -> None:
        """Start the next draft, and tell it where the target listens. Does not wait; the one before has ended.

        Raises `PeerLostError` when no other one can come.
        """
        ...

    def ending(self, timeout: float, /) -> str | None:
        """How the present draft ended, as one line; None if not within `timeout` seconds (0 polls).

        Raises `ConfigError` for the user's mistake that the draft found.
        """
        ...

    def met(self) -> None:
        """The present draft has said Hello."""
        ...

    def dismiss(self) -> None:
        """End the present draft, whose link is closed. Does not wait."""
        ...

    def stop(self) -> None:
        """End the draft, and start no other. Idempotent."""
        ...


class DraftRestart:
    """The target's search for the next draft. `listen` makes a link's listening end from a nonce."""

    def __init__(
        self, source: DraftSource, listen: Callable[[int], Transport], own: Hello, timeout_seconds: float
    ) -> None:
        self.failure: str | None = None
        self._source = source
        self._listen = listen
        self._own = own
        self._timeout_seconds = timeout_seconds
        self._told = FIRST_INCARNATION
        self._handshake: Handshake | None = None
        self._num_fruitless = 0
        self._not_before = self._next_look = 0.0
        self._dismiss_at = math.inf

    def lost(self, reason: str) -> None:
        """The present draft is gone, or is to go."""
        self._dismiss_at = time.monotonic() + FAREWELL_SECONDS
        self._fail(reason)

    def accepted(self) -> None:
        """A candidate of the present draft was accepted: it is worth replacing."""
        self._num_fruitless = 0

    def poll(self) -> tuple[Transport, Hello] | None:
        """A draft that has said Hello, with its link; None without one."""
        try:
            self._start_next()
            peer = None if self._handshake is None else self._handshake.receive(0.0)
            if peer is None:
                return None
            if peer.incarnation != self._told:
                raise PeerProtocolError(f"incarnation {peer.incarnation} came in the place of {self._told}")
            self._source.met()
        except ConfigError as error:
            self._give_up(f"the draft that was to replace it is refused: {error}")
            return None
        except Exception as error:  # noqa: BLE001 - the target goes on, whatever it is
            self._fail(first_line(error))
            return None
        assert self._handshake is not None
        link, self._handshake = self._handshake.link, None
        return link, peer

    def close(self) -> None:
        """Stop looking. Idempotent."""
        self._give_up("the engine is closed")

    def _start_next(self) -> None:
        now = time.monotonic()
        if now >= self._dismiss_at:
            self._dismiss_at = math.inf
            self._source.dismiss()
        if self.failure is not None or now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        end = self._source.ending(0.0)
        if end is None:
            return
        if self._handshake is not None:
            raise PeerLostError(end)
        if now < self._not_before:
            return
        nonce = secrets.randbits(64)
        try:
            link = self._listen(nonce)
        except ConfigError as error:  # the address of the former link may still be taken
            raise PeerLostError(str(error)) from error
        self._told, self._dismiss_at = self._told + 1, math.inf
        try:
            self._handshake = Handshake(link, self._own, self._timeout_seconds)
        except Exception:
            link.close()
            raise
        try:
            self._source.tell(self._told, Rendezvous(link.address, nonce))
        except PeerLostError as error:
            self._give_up(str(error))

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
        self.failure = self.failure or reason

    def _drop(self) -> None:
        if self._handshake is not None:
            self._handshake.link.close()
            self._handshake = None
