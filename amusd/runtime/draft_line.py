"""The target's line to its draft: whether one is there, what it is told, and what it says.

Nothing here waits for an acknowledgement. A draft that is slow, wrong or gone costs time, never a token; one that is
gone is replaced (`succession.py`), and the next one is told what is committed by then.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field

from amusd.errors import PeerLostError, PeerProtocolError
from amusd.policies.silence import Reminder, Silence
from amusd.protocol.messages import Candidate, Close, Failed, Hello, Message, Open, Progress, Shutdown
from amusd.protocol.target_session import Reception, TargetSession
from amusd.runtime.handshake import told
from amusd.runtime.request import Request
from amusd.runtime.succession import Succession, last_line
from amusd.sampling.rows import ProbabilityRow, unpack_rows
from amusd.tracing.messages import RECEIVE, SEND, record_message
from amusd.tracing.metrics import DraftCounts
from amusd.tracing.recorder import Recorder
from amusd.tracing.tally import Tally
from amusd.transport.base import Transport
from amusd.types import FinishReason

FINAL_PROGRESS_SECONDS = 0.5
"""How long a finished sequence waits for the draft's own counts."""

MAX_DRAINED = 1_000
"""Messages that are taken in between two passes at most."""

MAX_DRAIN_SECONDS = 0.02
"""How long that may take: a message may be large."""

MAX_NONSENSE = 100
"""So many messages in a row that the protocol forbids, and the draft counts as lost."""


@dataclass
class DraftLine:
    """Of one target, over all its sequences: one at a time, from `begin` to `end`.

    `link` and `peer` (the draft's Hello) are None when there is no draft at all; `link` also between two drafts.
    """

    recorder: Recorder
    vocab_size: int
    """Of the target."""
    link: Transport | None = None
    peer: Hello | None = None
    round_trip_seconds: float = 0.0
    """What the link itself takes of every answer: nobody is silent for that long."""
    succession: Succession | None = None
    """Where the next draft comes from; None: a lost one is not replaced."""
    failure: str | None = None
    """Why no draft is used any more, once that has happened."""
    losses: list[str] = field(default_factory=list)
    """Why drafts were lost, each in one line."""
    num_restarts: int = 0
    """Drafts that took the place of a lost one."""
    _session: TargetSession = field(init=False)
    _request: Request = field(init=False)
    _tally: Tally = field(init=False)
    _silence: Silence = field(default_factory=Silence)
    _max_silence_seconds: float = 0.0
    _num_nonsense: int = 0
    """Messages in a row that the protocol forbids."""
    _reminder: Reminder | None = None
    """Of what the draft was told of the sequence; None as long as it was told nothing."""
    _has_progress: bool = False
    """The draft's counts have come since this was last set to False."""

    @property
    def has_draft(self) -> bool:
        """A draft is connected and has not failed."""
        return self.link is not None and self.peer is not None and self.failure is None

    @property
    def may_hear(self) -> bool:
        """A draft works on the sequence, and is not silent."""
        return self._session.attached and self.patience_seconds > 0

    @property
    def patience_seconds(self) -> float:
        """How much longer the draft may be waited for."""
        return self._silence.seconds_left(self._max_silence_seconds)

    # What the draft is told

    def begin(self, session: TargetSession, request: Request, tally: Tally) -> None:
        """A sequence begins; a draft that is there works on it. `tally` counts what is heard."""
        self._session, self._request, self._tally = session, request, tally
        self._max_silence_seconds = request.max_silence_seconds + self.round_trip_seconds
        self._meet_next()
        self._open()

    def look_for_next(self) -> bool:
        """Have the next draft work on the sequence, if one has come in the place of a lost one: whether it has."""
        if not self._meet_next():
            return False
        self._open()
        return True

    def answer(self) -> None:
        """Tell the draft what is committed by now.

        A silent one is told now and then, or a stopped one would find its link full; a verdict is cumulative. One that
        never sent candidates of the sequence may not have got its opening; if it has, it ignores the second one.
        """
        session = self._session
        if not session.attached or self._reminder is None:
            return
        is_reminder = self._reminder.is_due(time.monotonic())
        if is_reminder and not self._reminder.is_answered and not self._send(self._opening()):
            return
        if is_reminder or self.may_hear:
            self._send(session.verdict())

    def verified(self) -> None:
        """Candidates of this draft were judged: it is of use."""
        if self.succession is not None:
            self.succession.verified()

    def end(self, reason: FinishReason) -> None:
        """The sequence is over. Waits a moment for the draft's own counts."""
        session = self._session
        if session.attached and self._send(Close(session.sequence_id, reason)):
            self._await_final_progress()
        session.detach()

    def shut_down(self) -> None:
        """Tell the draft that all is over, and close the link."""
        if self.succession is not None:
            self.succession.close()
            self.succession = None
        if self.link is not None:
            if self.has_draft:
                record_message(self.recorder, SEND, Shutdown())
                with suppress(PeerLostError):
                    self.link.send(Shutdown())
            self.link.close()

    # What it says

    def drain(self) -> None:
        """Take in what has arrived."""
        if self._session.attached and not self.has_draft:
            self._session.detach()
        end = time.monotonic() + MAX_DRAIN_SECONDS
        for _ in range(MAX_DRAINED):  # a flood must not keep the target from its pass
            if not (self._session.attached and self.take(0.0)) or time.monotonic() >= end:
                break

    def take(self, timeout: float) -> bool:
        """Receive and handle one message; False when none came within `timeout` seconds."""
        if not self.has_draft:
            return False
        assert self.link is not None
        start = time.monotonic()
        try:
            message = self.link.receive(timeout)
        except PeerLostError as error:
            self._lose(str(error))
            return False
        if timeout > 0:
            self._silence.waited(time.monotonic() - start)
        if message is not None:
            self._handle(message)
        return message is not None

    def _meet_next(self) -> bool:
        """Look for a draft in the place of a lost one, without waiting; whether it has come."""
        if self.succession is None or self.link is not None:
            return False
        found = self.succession.poll()
        self.failure = self.succession.failure
        if found is None:
            return False
        self.link, self.peer = found
        self._silence.heard()
        self._num_nonsense = 0
        self.num_restarts += 1
        self._tally.num_draft_restarts += 1
        self.recorder.instant("draft_back", self._session.sequence_id, incarnation=self.peer.incarnation)
        return True

    def _open(self) -> None:
        """Have the draft work on the sequence, whatever is committed of it by now."""
        if self._request.drafter is None or not self.has_draft:
            return
        assert self.peer is not None
        self._session.attach(self.peer.incarnation)
        self._reminder = Reminder(time.monotonic(), self._max_silence_seconds)
        self._send(self._opening())

    def _opening(self) -> Open:
        session, request = self._session, self._request
        assert self.peer is not None
        assert request.drafter is not None
        return Open(
            sequence_id=session.sequence_id,
            incarnation=self.peer.incarnation,
            token_ids=session.committed,
            max_length=session.max_length,
            drafter=request.drafter,
            max_lookahead=request.policy.max_lookahead,
            tokens_per_message=request.policy.tokens_per_message,
            # a draft that joins late is told the rest
            reference=request.reference[session.committed_length - len(request.prompt) :],
            distribution=request.distribution,
            fan_out=request.policy.fan_out,
            rows_per_step=request.policy.rows_per_step,
        )

    def _await_final_progress(self) -> None:
        deadline = time.monotonic() + min(FINAL_PROGRESS_SECONDS, self.patience_seconds)
        self._has_progress = False
        while not self._has_progress and self.has_draft and (left := deadline - time.monotonic()) > 0:
            self.take(left)

    def _handle(self, message: Message) -> None:
        if isinstance(message, Candidate):
            reception = self._receive_candidate(message)
            num_ready = self._session.num_candidates
            record_message(self.recorder, RECEIVE, message, reception=reception, num_ready=num_ready)
            self._note_answer(message)
            self._judge_sense(makes_sense=reception not in ("refused", Reception.FOREIGN.value))
            return
        record_message(self.recorder, RECEIVE, message)
        if isinstance(message, Failed):
            self._lose(told(message))
            return
        self._judge_sense(makes_sense=isinstance(message, Progress))
        if isinstance(message, Progress) and message.sequence_id == self._session.sequence_id:
            self._has_progress = True
            self._tally.draft = DraftCounts.of(message)

    def _receive_candidate(self, message: Candidate) -> str:
        """Take it in; return what became of it, for the record."""
        session = self._session
        try:
            reception = session.receive(message, self._rows(message))
        except PeerProtocolError:
            self._tally.num_refused += 1
            return "refused"
        if reception is Reception.FOREIGN:
            self._tally.num_refused += 1
        elif reception is not Reception.TAKEN:
            self._tally.num_stale_candidates += 1
        return reception.value

    def _rows(self, candidate: Candidate) -> tuple[ProbabilityRow, ...]:
        """What its tokens were drawn from. Raises `PeerProtocolError` for what no draft could have drawn from."""
        if not candidate.draft_probs:
            return ()
        try:
            return unpack_rows(candidate.draft_probs, candidate.token_ids, self.vocab_size)
        except ValueError as error:
            raise PeerProtocolError(f"candidate: {error}") from error

    def _note_answer(self, message: Candidate) -> None:
        addressed = self.peer is not None and message.incarnation == self.peer.incarnation
        if addressed and message.sequence_id == self._session.sequence_id and self._reminder is not None:
            self._reminder.heard(time.monotonic())

    def _judge_sense(self, *, makes_sense: bool) -> None:
        """A draft that talks nonsense is not heard, and in the end not listened to."""
        if makes_sense:
            self._silence.heard()
            self._num_nonsense = 0
            return
        self._num_nonsense += 1
        if self._num_nonsense >= MAX_NONSENSE:
            self._lose(f"it sent {MAX_NONSENSE} messages in a row that the protocol forbids")

    def _send(self, message: Message) -> bool:
        """Send, or note that the draft is gone; False then."""
        assert self.link is not None
        record_message(self.recorder, SEND, message)
        try:
            self.link.send(message)
        except PeerLostError as error:
            self._lose(str(error))
            return False
        return True

    def _lose(self, reason: str) -> None:
        """Go on without it, and look for the next one if that can be."""
        self._session.detach()
        self._tally.num_draft_losses += 1
        self.recorder.instant("draft_lost", self._session.sequence_id, reason=reason)
        self.losses.append(last_line(reason))
        if self.succession is None:
            self.failure = reason
            return
        self.succession.lost(reason)
        assert self.link is not None
        self.link.close()
        self.link = None
        self.failure = self.succession.failure
