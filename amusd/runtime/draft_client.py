"""The target's client of its draft: whether one is there, what it is told, and what it says.

Nothing here waits for an acknowledgement. A draft that is slow, wrong or gone costs time, never a token. One that is
gone is replaced (`draft_restart.py`), and the next one is told what is committed by then.

A draft that says nothing is waited for `max_silence_seconds` in all, and then no more until it is heard again: one that
is stopped costs one pause. It is told again at longer and longer intervals, since a message may have been lost and the
link of a stopped process must not fill. One that owes an answer for longer than `max_silence_seconds` is silent, and
after `SILENCES` times as long it is replaced.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from amusd.errors import PeerLostError, PeerProtocolError, first_line
from amusd.protocol.messages import (
    MAX_FEATURE_BYTES,
    Candidate,
    Close,
    Failed,
    Features,
    Hello,
    Message,
    Progress,
    Shutdown,
)
from amusd.protocol.target_session import Reception
from amusd.runtime.draft_restart import DraftRestart
from amusd.runtime.handshake import told
from amusd.runtime.target_sequence import TargetSequence
from amusd.sampling.acceptance import ProbabilityRow, unpack_rows
from amusd.tracing.messages import RECEIVE, SEND, record_message
from amusd.tracing.recorder import Recorder
from amusd.transport.base import Transport
from amusd.types import DraftPresence, FinishReason

logger = logging.getLogger(__name__)

FINAL_PROGRESS_SECONDS = 0.5
"""How long a finished sequence waits for the draft's own counts."""

MAX_DRAINED = 1_000
"""Messages that are taken in between two passes at most."""

MAX_DRAIN_SECONDS = 0.02
"""How long that may take: a message may be large."""

MAX_NONSENSE = 100
"""After this many messages in a row that the protocol forbids, the draft counts as lost."""

SILENCES = 10
"""After so many times `max_silence_seconds` without an answer that it owes, the draft counts as lost."""
TAKE_IN_SECONDS = 0.02
"""Added to that for each token of sequences that the draft has not begun: it takes all of them in before it answers."""

EVERY_SEQUENCE = -1
"""In the place of a sequence's id: all of them."""


class Reminder:
    """The times at which a draft that does not answer is told again, in seconds of one clock."""

    def __init__(self, now: float, first_seconds: float) -> None:
        """It is told now; without an answer again after `first_seconds`, then after twice that, and so on."""
        self.is_answered = False
        """The draft has answered at least once, so it has got what it was told first."""
        self._first_seconds = self._seconds = first_seconds
        self._due = now + first_seconds

    def heard(self, now: float) -> None:
        """The draft answered."""
        self.is_answered = True
        self._seconds = self._first_seconds
        self._due = now + self._seconds

    def is_due(self, now: float) -> bool:
        """Whether it is to be told now; the next time is later then."""
        if now < self._due:
            return False
        self._seconds *= 2
        self._due = now + self._seconds
        return True


@dataclass
class DraftClient:
    """One target's client of its draft, for all sequences from `open` to `close`.

    `link` and `peer` (the draft's Hello) are None when there is no draft at all; `link` also between two drafts.
    """

    recorder: Recorder
    vocab_size: int
    """Columns of the target's logits."""
    link: Transport | None = None
    peer: Hello | None = None
    round_trip_seconds: float = 0.0
    """What the link itself adds to every answer of the draft; it does not count as silence."""
    draft_restart: DraftRestart | None = None
    """Where the next draft comes from; None: a lost one is not replaced."""
    failure: str | None = None
    """Why no draft is used any more, once that has happened."""
    losses: list[str] = field(default_factory=list)
    """Why drafts were lost, each in one line."""
    num_restarts: int = 0
    """Drafts that took the place of a lost one."""
    is_silent: bool = False
    """The draft owes an answer for longer than `max_silence_seconds`."""
    _asked_ns: int | None = None
    """When this draft was told the first thing that it has not answered; None: it owes no answer."""
    _sequences: dict[int, TargetSequence] = field(default_factory=dict)
    """Those that are open, by id."""
    _next_sequence_id: int = 0
    """Above those of all sequences so far."""
    _reminders: dict[int, Reminder] = field(default_factory=dict)
    """For each open sequence that this draft was told of, by id."""
    _num_features: dict[int, int] = field(default_factory=dict)
    """Positions whose features this draft was sent, of each sequence that it was told of, by id."""
    _closed: dict[int, tuple[TargetSequence, int]] = field(default_factory=dict)
    """Those whose counts are awaited, by id, and until when."""
    _silent_ns: Counter[int] = field(default_factory=Counter)
    """How long the draft was waited for since it was last heard: of each sequence, by id, and of `EVERY_SEQUENCE`."""
    _num_nonsense: int = 0
    """Messages in a row that the protocol forbids."""

    @property
    def has_draft(self) -> bool:
        """A draft is connected and has not failed."""
        return self.link is not None and self.peer is not None and self.failure is None

    @property
    def presence(self) -> DraftPresence:
        """The state of the draft, where there is to be one."""
        if self.failure is not None:
            return DraftPresence.FAILED
        if not self.has_draft:
            return DraftPresence.AWAY
        return DraftPresence.SILENT if self.is_silent else DraftPresence.PRESENT

    @property
    def patience_seconds(self) -> float:
        """How much longer the draft may be waited for; 0: not at all, it is silent."""
        if self.is_silent:
            return 0.0
        return max(0, round(self._max_silence_seconds * 1e9) - self._silent_ns[EVERY_SEQUENCE]) / 1e9

    @property
    def _max_silence_seconds(self) -> float:
        limits = (sequence.request.max_silence_seconds for sequence in self._sequences.values())
        return max(limits, default=0.0) + self.round_trip_seconds

    def may_hear(self, sequence: TargetSequence) -> bool:
        """A draft works on the sequence, and is not silent, neither of it nor of all.

        It may have no room for one sequence while it serves others, which must not wait for that one in each pass.
        """
        number = sequence.sequence_id
        if number not in self._reminders or not sequence.session.attached or not self.patience_seconds:
            return False
        return self._silent_ns[number] < (sequence.request.max_silence_seconds + self.round_trip_seconds) * 1e9

    # What the draft is told

    def open(self, sequence: TargetSequence) -> None:
        """Have the draft work on a sequence that begins, if there is a draft and the sequence wants one."""
        self._next_sequence_id = sequence.sequence_id + 1
        if not sequence.uses_draft:
            return
        self._sequences[sequence.sequence_id] = sequence
        if not self.look_for_next():
            self._attach(sequence)

    def look_for_next(self) -> bool:
        """Have the next draft work on the open sequences, if one has come in the place of a lost one: whether it has.

        Does not wait.
        """
        if self.draft_restart is None or self.link is not None:
            return False
        found = self.draft_restart.poll()
        self.failure = self.draft_restart.failure
        if found is None:
            return False
        self.link, self.peer = found
        self._silent_ns.clear()
        self.num_restarts += 1
        by_need = sorted(self._sequences.values(), key=lambda sequence: -sequence.session.remaining)
        for sequence in by_need:
            sequence.metrics.num_draft_restarts += 1
            self.recorder.instant("draft_back", sequence.sequence_id, incarnation=self.peer.incarnation)
            self._attach(sequence)
            if sequence.is_prefilled:
                sequence.observer.draft_joined()
        return True

    def answer(self, sequence: TargetSequence) -> None:
        """Tell the draft what is committed by now.

        A silent one is told now and then only; a verdict is cumulative. One that never sent candidates of the sequence
        may not have got its opening; if it has, it ignores the second one.
        """
        reminder = self._reminders.get(sequence.sequence_id)
        if reminder is None or not sequence.session.attached:
            return
        is_due = reminder.is_due(self._now())
        if is_due and not reminder.is_answered and not self._send_opening(sequence):
            return
        if is_due or self.may_hear(sequence):
            if reminder.is_answered:  # else the draft may have refused the sequence
                self._ask()
            self._send(sequence.session.verdict())

    def features_due(self, sequence: TargetSequence) -> range:
        """Positions whose features the draft lacks. A silent one lacks none: it is sent them when it is heard again."""
        end = sequence.cache.length
        return range(self._num_features[sequence.sequence_id] if self.may_hear(sequence) else end, end)

    def send_features(self, sequence: TargetSequence, start: int, features: Tensor) -> None:
        """Send the features, bfloat16 [rows, width], of the positions from `start` on, in frames of a bounded size.

        Sends nothing to a draft that was lost meanwhile. What finds no room before the draft has read is due at the
        next pass.
        """
        if not self.may_hear(sequence):
            return
        assert self.peer is not None
        assert self.link is not None
        for rows in torch.split(features, max(1, MAX_FEATURE_BYTES // (2 * features.shape[1]))):
            end, data = start + len(rows), rows.contiguous().view(torch.uint8).numpy().tobytes()
            if not self.link.has_room(2 * len(data)):  # as much again is left to other messages
                return
            if not self._send(Features(sequence.sequence_id, self.peer.incarnation, start, end, data)):
                return
            self._num_features[sequence.sequence_id] = start = end

    def accepted(self) -> None:
        """Candidates were accepted: if their draft has not been lost meanwhile, it is worth replacing."""
        if self.draft_restart is not None and self.has_draft:
            self.draft_restart.accepted()

    def close(self, sequence: TargetSequence, reason: FinishReason) -> None:
        """The sequence is over. What the draft has counted of it is awaited for a moment from now on."""
        not_over = tuple(number for number in self._not_over if number != sequence.sequence_id)
        if sequence.session.attached and self._send(Close(sequence.sequence_id, reason, not_over)):
            seconds = min(FINAL_PROGRESS_SECONDS, self.patience_seconds)
            self._closed[sequence.sequence_id] = sequence, self.recorder.now_ns() + round(seconds * 1e9)
        sequence.session.detach()
        self._sequences.pop(sequence.sequence_id, None)
        self._reminders.pop(sequence.sequence_id, None)
        self._num_features.pop(sequence.sequence_id, None)
        self._silent_ns.pop(sequence.sequence_id, None)

    def seconds_for_counts(self, sequence: TargetSequence) -> float:
        """How much longer the draft's counts of a closed sequence are waited for; 0: no longer, or they have come."""
        _, due_ns = self._closed.get(sequence.sequence_id, (sequence, 0))
        return max(0, due_ns - self.recorder.now_ns()) / 1e9

    def forget(self, sequence: TargetSequence) -> None:
        """Wait no longer for the counts of a closed sequence."""
        self._closed.pop(sequence.sequence_id, None)

    def shut_down(self) -> None:
        """Tell the draft that all is over, and close the link."""
        if self.draft_restart is not None:
            self.draft_restart.close()
            self.draft_restart = None
        if self.link is not None:
            if self.has_draft:
                record_message(self.recorder, SEND, Shutdown())
                with suppress(PeerLostError):
                    self.link.send(Shutdown())
            self.link.close()

    # What it says

    def drain(self) -> None:
        """Take in what has arrived, and judge whether the draft is silent once all of it was read."""
        end = self._now() + MAX_DRAIN_SECONDS
        for _ in range(MAX_DRAINED):  # a flood must not keep the target from its pass
            if not (self._reminders or self._closed):
                return
            if not self.take(0.0):
                self._judge_silence()
                return
            if self._now() >= end:
                return

    def take(self, timeout: float, waiting: Iterable[TargetSequence] = ()) -> bool:
        """Receive and handle one message; False when none came within `timeout` seconds.

        `waiting`: the sequences that need it before they go on.
        """
        if not self.has_draft:
            return False
        assert self.link is not None
        start_ns = self.recorder.now_ns()
        try:
            message = self.link.receive(timeout)
        except Exception as error:  # noqa: BLE001 - the target goes on, whatever it is
            self._lose(first_line(error))
            return False
        if timeout > 0:
            waited_ns = self.recorder.now_ns() - start_ns
            for number in (EVERY_SEQUENCE, *(sequence.sequence_id for sequence in waiting)):
                self._silent_ns[number] += waited_ns
        if message is not None:
            self._handle(message)
        return message is not None

    def _now(self) -> float:
        return self.recorder.now_ns() / 1e9

    @property
    def _not_over(self) -> tuple[int, ...]:
        return *self._sequences, self._next_sequence_id

    def _attach(self, sequence: TargetSequence) -> None:
        """Have the draft work on the sequence, whatever is committed of it by now."""
        if not self.has_draft:
            return
        assert self.peer is not None
        sequence.session.attach(self.peer.incarnation)
        self._reminders[sequence.sequence_id] = Reminder(self._now(), self._max_silence_seconds)
        self._send_opening(sequence)

    def _send_opening(self, sequence: TargetSequence) -> bool:
        assert self.peer is not None
        self._num_features[sequence.sequence_id] = 0
        self._ask()
        return self._send(sequence.opening(self.peer.incarnation, self._not_over))

    def _handle(self, message: Message) -> None:
        sequence = self._sequences.get(getattr(message, "sequence_id", -1))
        if isinstance(message, Candidate):
            reception = self._receive_candidate(message)
            num_ready = 0 if sequence is None else sequence.session.num_candidates
            record_message(self.recorder, RECEIVE, message, reception=reception, num_ready=num_ready)
            self._note_answer(message)
            self._judge_sense(makes_sense=reception not in ("refused", Reception.FOREIGN.value))
            return
        record_message(self.recorder, RECEIVE, message)
        if isinstance(message, Failed):
            self._lose(told(message))
            return
        self._judge_sense(makes_sense=isinstance(message, Progress))
        if isinstance(message, Progress):
            sequence, _ = self._closed.pop(message.sequence_id, (sequence if message.open_ns else None, 0))
            if sequence is not None:
                self._silent_ns.clear()  # it is at long work, for any of them
                sequence.metrics.reported(message)

    def _receive_candidate(self, message: Candidate) -> str:
        """Take it in; return what became of it, for the record."""
        sequence = self._sequences.get(message.sequence_id)
        if sequence is None:
            return Reception.STALE.value
        try:
            reception = sequence.session.receive(message, self._rows(message))
        except PeerProtocolError:
            sequence.metrics.num_refused += 1
            return "refused"
        if reception is Reception.FOREIGN:
            sequence.metrics.num_refused += 1
        elif reception is not Reception.TAKEN:
            sequence.metrics.num_stale_candidates += 1
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
        reminder = self._reminders.get(message.sequence_id)
        if reminder is not None and self.peer is not None and message.incarnation == self.peer.incarnation:
            reminder.heard(self._now())
            self._silent_ns[message.sequence_id] = 0

    def _ask(self) -> None:
        """The draft owes an answer from now on, if it has owed none."""
        if self._asked_ns is None:
            self._asked_ns = self.recorder.now_ns()

    def _judge_silence(self) -> None:
        """A draft that does not answer in time is silent; it is lost in the end, where another one can come."""
        if self._asked_ns is None or not self._sequences:
            return
        seconds, limit = self._now() - self._asked_ns / 1e9, self._max_silence_seconds
        self.is_silent = seconds > limit
        begun = {number for number, reminder in self._reminders.items() if reminder.is_answered}
        waiting = (sequence for number, sequence in self._sequences.items() if number not in begun)
        prompts = TAKE_IN_SECONDS * sum(sequence.session.committed_length for sequence in waiting)
        if self.draft_restart is not None and seconds > SILENCES * limit + prompts:
            reason = f"it has said nothing for {seconds:.1f} s"
            logger.warning("amusd: the draft is replaced: %s", reason)
            self._lose(reason)

    def _judge_sense(self, *, makes_sense: bool) -> None:
        """A draft that sends nonsense counts as silent, and in the end as lost."""
        if makes_sense:
            self.is_silent, self._asked_ns = False, None
            self._silent_ns[EVERY_SEQUENCE] = 0
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
        except Exception as error:  # noqa: BLE001 - the target goes on, whatever it is
            self._lose(self._last_words() or first_line(error))
            return False
        return True

    def _last_words(self) -> str | None:
        """Why a draft that cannot be reached has failed, if it has said so; what else it has sent is dropped."""
        assert self.link is not None
        with suppress(Exception):  # the link is of no more use, whatever it is
            for _ in range(MAX_DRAINED):
                message = self.link.receive(0.0)
                if message is None or isinstance(message, Failed):
                    return None if message is None else told(message)
        return None

    def _lose(self, reason: str) -> None:
        """Go on without it, and look for the next one if that can be. The first line of the reason counts."""
        reason = (reason.strip().splitlines() or ["it gave no reason"])[0]
        self._reminders.clear()
        self.is_silent, self._asked_ns, self._num_nonsense = False, None, 0
        for sequence in (*self._sequences.values(), *(sequence for sequence, _ in self._closed.values())):
            sequence.session.detach()
            sequence.metrics.lost_draft()
            self.recorder.instant("draft_lost", sequence.sequence_id, reason=reason)
        self._closed.clear()
        self.losses.append(reason)
        if self.draft_restart is None:
            self.failure = reason
            return
        self.draft_restart.lost(reason)
        assert self.link is not None
        self.link.close()
        self.link = None
        self.failure = self.draft_restart.failure
