"""A target's connection to its draft: the link while there is a draft, its loss, and the draft that replaces it.

A draft that fails is lost for a reason in one line. No call raises: the target goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from amusd.errors import first_line
from amusd.protocol.messages import Failed, Message, Shutdown
from amusd.runtime.draft_restart import DraftRestart
from amusd.runtime.handshake import told_by
from amusd.runtime.patience import MAX_NONSENSE, Silence
from amusd.transport.base import Transport
from amusd.types import DraftPresence

MAX_LAST_WORDS = 1_000
"""Most messages of a lost draft that are searched for its reason."""


@dataclass
class Connection:
    """A target's connection to its draft. Any thread may read what it says of the draft."""

    link: Transport | None = None
    """None without a draft, and between two drafts."""
    incarnation: int = 0
    """Number of the newest draft; 0: there was none."""
    draft_restart: DraftRestart | None = None
    """Source of the next draft; None: a lost one is not replaced."""
    on_lost: Callable[[str], object] = lambda _reason: None
    """Called when a draft is lost."""
    silence: Silence = field(default_factory=Silence)
    losses: list[str] = field(default_factory=list)
    """Why drafts were lost, in one line each."""
    num_restarts: int = 0
    """Lost drafts that were replaced."""

    @property
    def failure(self) -> str | None:
        """Why no draft is used any more; None while there is or may be one."""
        if self.draft_restart is not None:
            return self.draft_restart.failure
        return self.losses[-1] if len(self.losses) > self.num_restarts else None

    @property
    def presence(self) -> DraftPresence:
        """The state of the draft."""
        if self.failure is not None:
            return "failed"
        if self.link is None:
            return "none" if self.draft_restart is None else "away"
        return "silent" if self.silence.is_too_long else "present"

    def find_next(self) -> bool:
        """Switch to a replacement draft if one is ready; return whether it is. Does not wait."""
        found = None if self.draft_restart is None or self.link is not None else self.draft_restart.poll()
        if found is None:
            return False
        self.link, self.incarnation = found
        self.num_restarts += 1
        self.silence.end()
        return True

    def accepted(self) -> None:
        """Candidates were accepted: their draft is worth replacing."""
        if self.draft_restart is not None and self.link is not None:
            self.draft_restart.accepted()

    def send(self, message: Message) -> bool:
        """Send to the draft. Return False if there is none, or if sending loses it."""
        if self.link is None:
            return False
        try:
            self.link.send(message)
        except Exception as error:  # noqa: BLE001 - the target goes on, whatever it is
            self.lose(self._last_words() or first_line(error))
            return False
        return True

    def receive(self, timeout: float) -> Message | None:
        """Return the next message, or None after `timeout` seconds. `Failed` loses the draft."""
        if self.link is None:
            return None
        try:
            message = self.link.receive(timeout)
        except Exception as error:  # noqa: BLE001 - the target goes on, whatever it is
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

    def judge_silence(self, now_ns: int, limit_seconds: float, num_new_tokens: int) -> str | None:
        """As `Silence.judge`, of a present draft; one that counts as lost is lost, if the next one can be found."""
        reason = None if self.link is None else self.silence.judge(now_ns, limit_seconds, num_new_tokens)
        if reason is None or self.draft_restart is None:
            return None
        self.lose(reason)
        return reason

    def lose(self, reason: str) -> None:
        """Go on without the draft, if there is one, and look for the next. The reason's first line counts."""
        if self.link is None:  # the next one may be on its way, which is not to blame
            return
        reason = (reason.strip().splitlines() or ["it gave no reason"])[0]
        self.losses.append(reason)
        self.link.drop()
        self.link = None
        if self.draft_restart is not None:
            self.draft_restart.lost(reason)
        self.on_lost(reason)

    def shut_down(self) -> None:
        """End the draft, and close the link. Idempotent."""
        if self.draft_restart is not None:
            self.draft_restart.close()
            self.draft_restart = None
        if self.send(Shutdown()) and self.link is not None:
            self.link.close()
            self.link = None

    def _last_words(self) -> str | None:
        assert self.link is not None
        with suppress(Exception):  # the link is of no more use, whatever it is
            for _ in range(MAX_LAST_WORDS):
                message = self.link.receive(0.0)
                if message is None or isinstance(message, Failed):
                    return None if message is None else told_by(message)
        return None
