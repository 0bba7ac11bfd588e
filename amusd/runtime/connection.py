"""A target's connection to its draft: search, link, loss and replacement of a draft.

    lost ──▶ its process has ended ──▶ the next one starts and listens ──▶ both say hello ──▶ it is used

The target goes on decoding meanwhile: after the first draft nothing here raises, and a search waits at most
`hello_seconds`. Each draft has its own link and nonce. `patience.Restarts` says when the target stays alone for good.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from amusd.clock import MONOTONIC, Clock
from amusd.config import EngineConfig
from amusd.errors import ConfigError, PeerLostError, PeerProtocolError, first_line
from amusd.logs import logger
from amusd.protocol.messages import DraftHello, Failed, Message, Shutdown, TargetHello
from amusd.runtime.draft_process import DRAFT, DraftSource
from amusd.runtime.hello import BUSY, check_pair, reported, told_by
from amusd.runtime.patience import MAX_NONSENSE, MAX_RESTARTS, Restarts, Silence
from amusd.transport.base import Link
from amusd.types import DraftPresence

LOOK_SECONDS = 0.05
POLL_SECONDS = 0.005
"""Pause between two tries to reach a first draft that does not listen yet."""
START_AGAIN_SECONDS = 1.0
"""Pause before the next try if this machine could make no link."""
FAREWELL_SECONDS = 1.0
"""Seconds that a lost draft has to end by itself and to show its traceback."""
MAX_LAST_WORDS = 1_000
"""Most messages of a lost draft that are searched for the reason."""


@dataclass
class Connection:
    """A target's connection to its draft. Any thread may read its public fields."""

    link: Link | None = None
    """Link to the present draft; None without a draft."""
    incarnation: int = 0
    """Number of the newest draft; 0: there was none."""
    source: DraftSource | None = None
    """Source of the next draft; None: a lost draft is not replaced."""
    startup_timeout_seconds: float = 300.0
    """How long a draft may take from its start to its hello."""
    clock: Clock = MONOTONIC
    on_lost: Callable[[str], object] = lambda _reason: None
    """Called when a draft is lost."""
    on_met: Callable[[], object] = lambda: None
    """Called when a draft has said hello."""
    silence: Silence = field(default_factory=Silence)
    losses: list[str] = field(default_factory=list)
    """One line for each lost draft: the reason."""
    num_restarts: int = 0
    """Number of lost drafts that were replaced."""
    pid: int | None = None
    """Process id of the newest draft, if it is on this machine."""
    chains: Sequence[str] = ()
    """Drafters of the newest draft that draft no trees."""
    _hello: TargetHello = field(default_factory=lambda: TargetHello(0, "", None))
    _wanted: Sequence[str] = ()
    """Drafters that each draft must have."""
    _arriving: Link | None = None
    """The link to a draft that has not said hello."""
    _is_started: bool = True
    """Whether the draft that is looked for has been started."""
    _restarts: Restarts = field(default_factory=Restarts)
    _gave_up: str | None = None
    """Why no further draft is looked for."""
    _deadline: float = math.inf
    """Latest time of the draft's hello, in seconds of the clock."""
    _drop_at: float = math.inf
    """When a lost draft is killed, in seconds of the clock."""

    @classmethod
    def to(cls, source: DraftSource, config: EngineConfig, running: ExitStack) -> Connection:
        """Connect to the drafts of `source`, which end with `running`."""
        connection = cls(source=source, startup_timeout_seconds=config.startup_timeout_seconds)
        running.callback(source.stop)
        running.callback(connection.shut_down)
        return connection

    @property
    def failure(self) -> str | None:
        """Why no draft is used any more; None while a draft is present or may come."""
        if self._gave_up is not None or self.source is not None:
            return self._gave_up
        return self.losses[-1] if len(self.losses) > self.num_restarts else None

    @property
    def presence(self) -> DraftPresence:
        """The state of the draft."""
        if self.failure is not None:
            return "failed"
        if self.link is None:
            return "none" if self.source is None else "away"
        return "silent" if self.silence.is_too_long else "present"

    # The search

    def await_first(self, tokenizer_hash: str, drafters: Sequence[str] = (), events: str | None = None) -> None:
        """Wait for the first draft, which must have these drafters. `events`: as in `TargetHello`.

        A killed draft is started again; a draft that ends by itself is not. Raises `ConfigError` if target and draft
        cannot work together, `PeerError` if no draft comes.
        """
        assert self.source is not None
        self._hello = TargetHello(0, tokenizer_hash, events if self.source.is_here else None)
        self._wanted = drafters
        self._deadline = self.clock.now() + self.startup_timeout_seconds
        while True:
            try:
                if self._look(LOOK_SECONDS):
                    break
            except PeerLostError as error:
                end = self.source.ended(FAREWELL_SECONDS)
                loss = error if end is None else PeerLostError(f"no hello from the draft: {end.in_words(DRAFT)}")
                is_final = not self.source.can_repeat or (end is not None and end.code >= 0)
                if is_final or self.clock.now() >= self._deadline:
                    raise loss from None
                self._search(str(loss), was_met=False)
                if self._gave_up is not None:
                    raise PeerLostError(self._gave_up) from None
            if self._arriving is None:
                self.clock.sleep(POLL_SECONDS)
        if not self.source.can_repeat:
            self.source = None

    def find_next(self, hello_seconds: float = 0.0) -> bool:
        """Switch to the next draft if it is ready; return whether it is.

        Waits for a hello at most `hello_seconds`, and only if the draft has just begun to listen.
        """
        if self.source is None or self.link is not None:
            return False
        try:
            if not self._look(0.0, hello_seconds):
                return False
        except ConfigError as error:
            self._drop_arriving()
            self._gave_up = f"the next draft is refused: {error}"
            return False
        except Exception as error:  # noqa: BLE001 - the target goes on, whatever it is
            logger.debug("no draft yet", exc_info=True)
            self._search(first_line(error), was_met=False)
            return False
        self.num_restarts += 1
        self.silence.end()
        return True

    def on_accepted(self) -> None:
        """Note that candidates of the present draft were accepted."""
        if self.link is not None:
            self._restarts.on_accepted()

    def _look(self, timeout: float, hello_seconds: float = 0.0) -> bool:
        """Take one step towards the next draft; return whether it has said hello. Raises the reason of a failure."""
        source, now = self.source, self.clock.now()
        assert source is not None
        if now >= self._drop_at:
            self._drop_at = math.inf
            source.drop()
        if self._gave_up is not None:
            return False
        if not self._is_started and now >= self._restarts.not_before and source.start():
            self._is_started, self._drop_at = True, math.inf
            if self.incarnation:
                self._deadline = now + self.startup_timeout_seconds
        if self._is_started:
            end = source.ended(0.0)  # asked first, so that last messages are still read below
            if self._arriving is None and now >= self._restarts.not_before:
                self._connect(source, now)
                timeout = max(timeout, hello_seconds)
            link = self._arriving
            if link is not None and (message := link.receive(timeout)) is not None:
                self._take_hello(source, link, message)
                return True
            if end is not None:
                raise PeerLostError(end.in_words(DRAFT))
            if link is not None and link.refusal is not None:
                raise self._refused(f"the draft refuses this target: {link.refusal}")
        if now >= self._deadline:
            why = "" if source.process else "; is its server at work?"
            raise PeerLostError(f"no hello from the draft within startup_timeout_seconds{why}")
        return False

    def _connect(self, source: DraftSource, now: float) -> None:
        try:
            self._arriving = source.connect()
        except (ConfigError, OSError):
            if not self.incarnation:
                raise
            self._restarts.not_before = now + START_AGAIN_SECONDS  # e.g. no descriptors: no fault of the draft
        if self._arriving is not None:
            number = max(self.incarnation, self._hello.incarnation) + 1
            self._hello = TargetHello(number, self._hello.tokenizer_hash, self._hello.events)
            self._arriving.send(self._hello)

    def _take_hello(self, source: DraftSource, link: Link, hello: Message) -> None:
        if isinstance(hello, Failed):
            if hello == BUSY:
                raise self._refused(f"drafter.address={link.address}: {BUSY.text}; it serves one at a time")
            raise reported(hello, "the draft failed while starting")
        if not isinstance(hello, DraftHello):
            raise PeerProtocolError(f"{type(hello).__name__} before its hello")
        if hello.incarnation != self._hello.incarnation:
            raise PeerProtocolError(f"a hello of incarnation {hello.incarnation} instead of {self._hello.incarnation}")
        check_pair(self._hello, hello, self._wanted)
        self.pid, self.chains = hello.pid if source.is_here else None, hello.chains
        try:
            self.on_met()
        except ConfigError as error:  # the draft's record cannot be written: not the draft's fault
            logger.warning("%s", error)
        self.link, self._arriving, self.incarnation = link, None, hello.incarnation
        self._restarts.on_met(self.clock.now())

    def _refused(self, line: str) -> ConfigError | PeerLostError:
        """A `ConfigError` for a first draft: the user's mistake. Else a `PeerLostError`.

        Later the network may have broken, or the server may still hold this target's last session.
        """
        return PeerLostError(line) if self.incarnation else ConfigError(line)

    def _search(self, reason: str, *, was_met: bool) -> None:
        """Begin to look for another draft. The lost one is killed after `FAREWELL_SECONDS`."""
        assert self.source is not None
        counts = was_met or self.source.process is not None  # a server may be busy, or away for long
        self._drop_arriving()
        self._is_started, self._drop_at = False, self.clock.now() + FAREWELL_SECONDS
        self._deadline = math.inf if self.incarnation else self._deadline
        if self._gave_up is None and self._restarts.on_lost(self.clock.now(), counts=counts):
            self._gave_up = f"{MAX_RESTARTS} restarts in a row brought no accepted candidate; at last: {reason}"

    def _drop_arriving(self) -> None:
        if self._arriving is not None:
            self._arriving.drop()
            self._arriving = None

    # The link

    def send(self, message: Message) -> bool:
        """Send to the draft. Return False if there is none, or if sending loses it."""
        if self.link is None:
            return False
        try:
            self.link.send(message)
        except Exception as error:  # noqa: BLE001 - the target goes on, whatever it is
            logger.debug("the draft is lost", exc_info=True)
            for _ in range(MAX_LAST_WORDS):  # a `Failed` gives the reason
                if self.receive(0.0) is None:
                    break
            self.lose(first_line(error))
            return False
        return True

    def receive(self, timeout: float) -> Message | None:
        """Return the next message, or None after `timeout` seconds. `Failed` loses the draft."""
        if self.link is None:
            return None
        try:
            message = self.link.receive(timeout)
        except Exception as error:  # noqa: BLE001 - the target goes on, whatever it is
            logger.debug("the draft is lost", exc_info=True)
            self.lose(first_line(error))
            return None
        if isinstance(message, Failed):
            self.lose(told_by(message))
            return None
        return message

    def count_nonsense(self) -> None:
        """Count a message that the protocol forbids; the draft is lost after `MAX_NONSENSE` in a row."""
        self.silence.num_nonsense += 1
        if self.silence.num_nonsense >= MAX_NONSENSE:
            self.lose(f"it sent {MAX_NONSENSE} messages in a row that the protocol forbids")

    def lose(self, reason: str) -> None:
        """Drop the draft, if there is one, and look for the next. Keeps the first line of `reason`."""
        if self.link is None:  # the next draft may be starting, and is not to blame
            return
        reason = (reason.strip().splitlines() or ["it gave no reason"])[0]
        self.losses.append(reason)
        self.link.drop()
        self.link = None
        if self.source is not None:
            self._search(reason, was_met=True)
        self.on_lost(reason)

    def shut_down(self) -> None:
        """End the session, and close the link; no further draft is looked for. Idempotent."""
        self._drop_arriving()
        self.source = None
        if self.send(Shutdown()) and self.link is not None:
            self.link.close()
            self.link = None
