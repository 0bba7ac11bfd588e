"""Starts the target's draft, and replaces a lost one while the target goes on decoding: then nothing here waits.

lost ──▶ its process has ended ──▶ listen on a fresh link, start the next one ──▶ Hello ──▶ handed to the target

Every draft has its own link and nonce, so nothing of an earlier one is taken for its own. After `MAX_RESTARTS` in a row
without an accepted candidate or `STEADY_SECONDS` of work, the target stays alone for good.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from amusd.child import Ended
from amusd.errors import ConfigError, PeerLostError, PeerProtocolError, first_line
from amusd.protocol.messages import Hello
from amusd.runtime.handshake import receive_hello
from amusd.transport.base import Transport

MAX_RESTARTS = 5
BACK_OFF_SECONDS = 0.25
"""Pause before the second of these restarts; doubled for each further one."""
STEADY_SECONDS = 60.0
"""A draft that was up so long is worth replacing whatever ended it, also if nobody asked for an answer meanwhile."""
LOOK_SECONDS = 0.05
START_AGAIN_SECONDS = 1.0
"""Pause before a draft is started again that could not be."""
DRAFT = "the draft's process"
FAREWELL_SECONDS = 1.0
"""How long a lost draft may take to end, so that a failed one shows its traceback."""


class DraftSource(Protocol):
    """Starts drafts, one at a time: in a child process, or on another machine."""

    @property
    def pid(self) -> int | None:
        """Process id of the present draft, if it is on this machine."""

    def tell(self, incarnation: int, address: str, nonce: int) -> None:
        """Start the next draft, and tell it where the target listens, and the number of the session.

        Does not wait; the one before has ended.
        """

    def ending(self, timeout: float, /) -> Ended | None:
        """How the present draft ended; None if not within `timeout` seconds (0 polls)."""

    def dismiss(self) -> None:
        """End the present draft, whose link is closed. Does not wait."""

    def stop(self) -> None:
        """End the draft, and start no other. Idempotent."""


@dataclass(eq=False)
class DraftRestart:
    """The target's search for a draft: for the first, which `start` starts, and for the next where one is lost."""

    source: DraftSource
    listen: Callable[[int], Transport]
    """Makes the listening end of a link, from a nonce."""
    timeout_seconds: float
    """How long a draft may take from its start to its Hello."""
    can_repeat: bool = True
    """False: `listen` works once, so that a lost draft is not replaced."""
    on_met: Callable[[], object] = lambda: None
    """Called when a draft has said Hello."""
    failure: str | None = None
    """Why there will be no further draft."""
    _own: Hello | None = None
    _link: Transport | None = None
    """The link of a draft that has not said Hello."""
    _told: int = 0
    """Incarnation of the newest draft."""
    _num_fruitless: int = 0
    """Restarts in a row without an accepted candidate."""
    _not_before: float = 0.0
    """The next draft is started no earlier; this and the next three are monotonic seconds."""
    _deadline: float = 0.0
    _dismiss_at: float = math.inf
    _steady_at: float = math.inf

    def start(self) -> None:
        """Have the next draft start, without waiting. Raises `ConfigError`."""
        nonce = secrets.randbits(64)
        self._link = self.listen(nonce)
        self._told, self._dismiss_at, self._steady_at = self._told + 1, math.inf, math.inf
        self._deadline = time.monotonic() + self.timeout_seconds
        self.source.tell(self._told, self._link.address, nonce)

    def first(self, tokenizer_hash: str) -> tuple[Transport, int]:
        """Wait for the first draft, to which the target says its `tokenizer_hash`. Returns its link and incarnation.

        One that is killed is started again; one that ends by itself would do so again. Raises `ConfigError` when the
        pair cannot work together, `PeerError` when no draft comes.
        """
        self._own = Hello(0, tokenizer_hash, ())
        deadline = self._deadline = time.monotonic() + self.timeout_seconds
        while True:
            try:
                if (found := self._look(LOOK_SECONDS)) is not None:
                    return found
            except PeerLostError as error:
                end = self.source.ending(FAREWELL_SECONDS)
                loss = error if end is None else PeerLostError(f"no Hello from the peer: {end.in_words(DRAFT)}")
                if not self.can_repeat or (end is not None and end.code >= 0) or time.monotonic() >= deadline:
                    raise loss from None
                self.lost(str(loss))
                if self.failure is not None:
                    raise PeerLostError(self.failure) from None
            if self._link is None:
                if time.monotonic() >= deadline:
                    raise PeerLostError("the draft was lost, and has not ended within startup_timeout_seconds")
                time.sleep(LOOK_SECONDS)

    def lost(self, reason: str) -> None:
        """Stop using the present draft, which is killed after `FAREWELL_SECONDS`."""
        self._drop()
        self._dismiss_at = time.monotonic() + FAREWELL_SECONDS
        if self.failure is not None:
            return
        self._num_fruitless = 1 if time.monotonic() >= self._steady_at else self._num_fruitless + 1
        if self._num_fruitless > MAX_RESTARTS:
            self._give_up(f"{MAX_RESTARTS} restarts in a row brought no accepted candidate; at last: {reason}")
        elif self._num_fruitless > 1:
            self._not_before = time.monotonic() + BACK_OFF_SECONDS * 2 ** (self._num_fruitless - 2)

    def accepted(self) -> None:
        """A candidate of the present draft was accepted: it is worth replacing."""
        self._num_fruitless = 0

    def poll(self) -> tuple[Transport, int] | None:
        """The link and incarnation of a draft that has said Hello; None without one."""
        try:
            return self._look(0.0)
        except ConfigError as error:
            self._give_up(f"the draft that was to replace it is refused: {error}")
        except Exception as error:  # noqa: BLE001 - the target goes on, whatever it is
            self.lost(first_line(error))
        return None

    def close(self) -> None:
        """Stop looking. Idempotent."""
        self._give_up("the engine is closed")

    def _look(self, timeout: float) -> tuple[Transport, int] | None:
        now = time.monotonic()
        if now >= self._dismiss_at:
            self._dismiss_at = math.inf
            self.source.dismiss()
        if self.failure is not None:
            return None
        end = self.source.ending(0.0)  # before what it has said is taken in
        if self._link is None:
            if end is not None and now >= self._not_before:
                try:
                    self.start()
                except (ConfigError, OSError):  # no descriptors, or the address is still taken: no fault of the draft
                    self._drop()
                    self._not_before = now + START_AGAIN_SECONDS
            return None
        assert self._own is not None
        if (peer := receive_hello(self._link, self._own, self._deadline, timeout)) is None:
            if end is not None:
                raise PeerLostError(end.in_words(DRAFT))
            return None
        if peer.incarnation != self._told:
            raise PeerProtocolError(f"a Hello of incarnation {peer.incarnation} instead of {self._told}")
        self._steady_at = time.monotonic() + STEADY_SECONDS
        self.on_met()
        link, self._link = self._link, None
        return link, self._told

    def _give_up(self, reason: str) -> None:
        self._drop()
        self.failure = self.failure or reason

    def _drop(self) -> None:
        if self._link is not None:
            self._link.drop()
            self._link = None
