"""The inner drafter of a cascade in a process of its own: three devices compute at once.

    draft  ──Candidate──▶  middle  ──Candidate──▶  target
           ◀───Verdict───          ◀───Verdict───

To its draft the middle is a target: what it has made is committed there. Where the target rejects some of it, a new
sequence begins with what is left, so that no verdict takes back committed tokens; the draft's cache still serves. The
middle never waits: without candidates it drafts alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from amusd.config import GREEDY, Distribution
from amusd.drafters.base import Drafter
from amusd.errors import PeerProtocolError
from amusd.logs import warn_once
from amusd.protocol.messages import Candidate, Close, Message, Open, Progress
from amusd.protocol.target_session import TargetSession
from amusd.runtime.connection import Connection

LOOKAHEAD = 16
"""Tokens that the draft may be ahead of the middle."""
MAX_DRAINED = 4 * LOOKAHEAD
"""Most messages taken in at once, for each sequence."""


@dataclass
class RemoteDraft:
    """The draft of a cascade's middle or of vLLM, for all sequences."""

    connection: Connection
    drafter: str
    vocab_size: int
    """Token ids of the target: `[0, vocab_size)`."""
    fan_out: int = 1
    """This and `rows_per_step`: as of `Open`."""
    rows_per_step: int = 1
    num_openings: int = 0
    _sessions: dict[int, TargetSession] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.connection.on_lost = self._lost

    def open(
        self, token_ids: Sequence[int], capacity: int, distribution: Distribution = GREEDY, follows: int = 0
    ) -> TargetSession:
        """Have it draft behind `token_ids`, fewer than `capacity`. `follows`: as of `Open`."""
        self.num_openings = number = self.num_openings + 1
        session = TargetSession(
            sequence_id=number, prompt=token_ids, max_length=capacity, vocab_size=self.vocab_size, fan_out=self.fan_out
        )
        session.attach(self.connection.incarnation)
        self._sessions[number] = session
        opening = Open(
            sequence_id=number,
            incarnation=self.connection.incarnation,
            token_ids=tuple(token_ids),
            max_length=capacity,
            drafter=self.drafter,
            max_lookahead=LOOKAHEAD,
            tokens_per_message=1,
            distribution=distribution,
            fan_out=self.fan_out,
            rows_per_step=self.rows_per_step,
            not_over=self._not_over,
            follows=follows,
        )
        self.connection.send(opening)
        return session

    def commit(self, session: TargetSession, token_ids: Sequence[int]) -> None:
        """Commit tokens locally; `tell` sends them."""
        for token_id in token_ids:
            session.begin(0)
            session.commit((token_id,), 0)

    def tell(self, session: TargetSession) -> None:
        """Tell it what is committed by now."""
        self.connection.send(session.verdict())

    def close(self, session: TargetSession) -> None:
        """The sequence is over."""
        self._sessions.pop(session.sequence_id, None)
        self.connection.send(Close(session.sequence_id, self._not_over))

    def drain(self, timeout: float = 0.0) -> bool:
        """Take in what has arrived; wait `timeout` seconds for the first message. Returns whether there was any."""
        number, most = 0, MAX_DRAINED * max(1, len(self._sessions))
        while number < most:  # a flood must not keep the target from its step
            if (message := self.connection.receive(0.0 if number else timeout)) is None:
                break
            number += 1
            self._handle(message)
        return number > 0

    def _lost(self, reason: str) -> None:
        for session in self._sessions.values():
            session.detach()
        self._sessions.clear()
        warn_once(f"a draft is lost, and its target goes on alone: {reason}")

    @property
    def _not_over(self) -> tuple[int, ...]:
        return *self._sessions, self.num_openings + 1

    def _handle(self, message: Message) -> None:
        session = self._sessions.get(getattr(message, "sequence_id", -1))
        try:
            if isinstance(message, Candidate) and session is not None:
                session.receive(message)
            elif isinstance(message, Progress) and session is not None and not message.open_ns:
                session.detach()  # it has refused the sequence
            elif not isinstance(message, (Candidate, Progress)):
                raise PeerProtocolError(f"a draft sends no {type(message).__name__}")
        except PeerProtocolError:
            self.connection.count_nonsense()
        else:
            self.connection.silence.end()


class RemoteDrafter(Drafter):
    """One sequence at a `RemoteDraft`. Timing changes how much it proposes, not the cascade's text."""

    def __init__(self, draft: RemoteDraft) -> None:
        self._draft = draft
        self._session: TargetSession | None = None
        self._last_id = 0

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        """Start from `token_ids`."""
        super().open(token_ids, capacity, fan_out)
        self.foresee(())

    def foresee(self, path: Sequence[int]) -> None:
        """Tell the draft of `path`. If it was told another text, open a new sequence."""
        text = (*self.committed, *path)
        known = () if self._session is None else self._session.committed
        if self._session is not None and text[: len(known)] == known:
            if new := text[len(known) :]:
                self._draft.commit(self._session, new)
                self._draft.tell(self._session)
            return
        self.close()
        if self._draft.connection.link is not None and len(text) < self.capacity:
            self._session = self._draft.open(text, self.capacity, self.distribution, self._last_id)
            self._last_id = self._session.sequence_id

    def propose(self, path: Sequence[int], room: int) -> Sequence[int]:
        """Up to `room` tokens that have arrived behind `path`, of which the draft is told."""
        self.foresee(path)
        if self._session is None:
            return ()
        self._draft.drain()
        return self._session.candidates[:room]

    def close(self) -> None:
        """Forget the sequence, here and there."""
        if self._session is not None:
            self._draft.close(self._session)
            self._session = None
