"""The target's client of its draft: whether one is there, what it is told, and what it says.

A draft that is slow, wrong or gone costs time, never a token. A silent one is waited for `max_silence_seconds` in all,
and told again at growing intervals, so that its link does not fill. A lost one (`patience.py`) is replaced
(`draft_restart.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from amusd.errors import PeerProtocolError, first_line
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
from amusd.runtime.draft_restart import DraftRestart
from amusd.runtime.handshake import told_by
from amusd.runtime.patience import MAX_NONSENSE, Silence, Told
from amusd.runtime.target_sequence import TargetSequence
from amusd.tracing.messages import record_message
from amusd.tracing.recorder import Recorder
from amusd.transport.base import Transport
from amusd.types import DraftPresence

logger = logging.getLogger(__name__)

FINAL_PROGRESS_SECONDS = 0.5
"""How long a finished sequence waits for the draft's counts."""
SETTLE_SECONDS = 0.01
"""The longest wait for them at once: a new request may come meanwhile."""

MAX_DRAINED = 1_000
"""Most messages taken in before a pass."""
MAX_DRAIN_SECONDS = 0.02
"""The longest time to take them in."""


@dataclass
class DraftClient:
    """A target's client of its draft, for all sequences."""

    recorder: Recorder
    link: Transport | None = None
    """None without a draft, and between two drafts."""
    peer: Hello | None = None
    round_trip_seconds: float = 0.0
    """The link's own delay, which does not count as silence."""
    draft_restart: DraftRestart | None = None
    """Source of the next draft; None: a lost one is not replaced."""
    failure: str | None = None
    """Why no draft is used any more; None while there is or may be one."""
    losses: list[str] = field(default_factory=list)
    """Why drafts were lost, in one line each."""
    num_restarts: int = 0
    """Lost drafts that were replaced."""
    _silence: Silence = field(default_factory=Silence)
    _sequences: dict[int, TargetSequence] = field(default_factory=dict)
    """The open ones that want a draft, by number."""
    _closed: dict[TargetSequence, int] = field(default_factory=dict)
    """Ended ones whose counts are awaited, each with the time (ns) until when."""
    _next_sequence_id: int = 0

    @property
    def presence(self) -> DraftPresence:
        """The state of the draft."""
        if self.failure is not None:
            return "failed"
        if self.link is None:
            return "none" if self.draft_restart is None else "away"
        return "silent" if self._silence.is_too_long else "present"

    @property
    def patience_seconds(self) -> float:
        """How much longer to wait for the draft; 0: it is silent."""
        return self._silence.seconds_left(self._max_silence_seconds)

    @property
    def _max_silence_seconds(self) -> float:
        limits = (sequence.request.max_silence_seconds for sequence in self._sequences.values())
        return max(limits, default=0.0) + self.round_trip_seconds

    def may_hear(self, sequence: TargetSequence) -> bool:
        """Whether a draft works on the sequence and is not silent.

        It may have no room for one sequence while it serves others.
        """
        if sequence.told is None or not self.patience_seconds:
            return False
        return sequence.told.waited_ns < (sequence.request.max_silence_seconds + self.round_trip_seconds) * 1e9

    # What the draft is told

    def open(self, sequence: TargetSequence) -> None:
        """Have the draft work on a new sequence that wants one."""
        self._next_sequence_id = sequence.sequence_id + 1
        if sequence.request.drafter is None:
            return
        self._sequences[sequence.sequence_id] = sequence
        if not self.look_for_next():
            self._attach(sequence)

    def look_for_next(self) -> bool:
        """Have a draft that replaces a lost one work on the open sequences; whether there is one."""
        if self.draft_restart is None or self.link is not None:
            return False
        found = self.draft_restart.poll()
        self.failure = self.draft_restart.failure
        if found is None:
            return False
        self.link, self.peer = found
        self.num_restarts += 1
        for sequence in sorted(self._sequences.values(), key=lambda each: -each.session.remaining):
            sequence.metrics.num_draft_restarts += 1
            self.recorder.instant("draft_back", sequence.sequence_id, incarnation=self.peer.incarnation)
            self._attach(sequence)
            if sequence.is_prefilled:
                sequence.observer.draft_joined()
        return True

    def answer(self, sequence: TargetSequence) -> None:
        """Tell the draft what is committed; a silent one only now and then.

        A draft without candidates may have lost its opening, which is sent again; a second one is ignored.
        """
        told = sequence.told
        if told is None:
            return
        is_due = told.take_reminder(self._now())
        if is_due and not told.is_answered:
            self._send_opening(sequence)
        if is_due or self.may_hear(sequence):
            if told.is_answered:  # else the draft may have refused the sequence
                self._silence.asked(self.recorder.now_ns())
            self._send(sequence.session.verdict())

    def features_due(self, sequence: TargetSequence) -> range:
        """Positions whose features the draft lacks; none for a silent one, which gets them later."""
        end, told = sequence.cache.length, sequence.told
        return range(told.num_features if told is not None and self.may_hear(sequence) else end, end)

    def send_features(self, sequence: TargetSequence, start: int, features: Tensor) -> None:
        """Send features, bfloat16 [rows, width], of positions from `start` on, as far as there is room."""
        for rows in torch.split(features, max(1, MAX_FEATURE_BYTES // (2 * features.shape[1]))):
            end, data = start + len(rows), rows.contiguous().view(torch.uint8).numpy().tobytes()
            if sequence.told is None or self.link is None or not self.link.has_room(2 * len(data)):
                return  # as much again is left to other messages
            sequence.told.num_features = end
            self._send(Features(sequence.sequence_id, self._incarnation, start, end, data))
            start = end

    def accepted(self) -> None:
        """Candidates were accepted: their draft is worth replacing."""
        if self.draft_restart is not None and self.link is not None:
            self.draft_restart.accepted()

    def close(self, sequence: TargetSequence) -> None:
        """End a sequence, and await the draft's counts for a moment."""
        number, seconds = sequence.sequence_id, min(FINAL_PROGRESS_SECONDS, self.patience_seconds)
        self._sequences.pop(number, None)
        if sequence.told is not None and self._send(Close(number, self._not_over)):
            self._closed[sequence] = self.recorder.now_ns() + round(seconds * 1e9)
        else:
            sequence.is_over = True
        sequence.session.detach()

    def settle(self, *, waits: bool) -> None:
        """End closed sequences whose counts are due; if `waits`, wait for a message of theirs."""
        left_ns = min(self._closed.values(), default=0) - self.recorder.now_ns()
        if waits and left_ns > 0:
            self.take(min(left_ns / 1e9, SETTLE_SECONDS))
        for sequence, due_ns in tuple(self._closed.items()):
            if self.recorder.now_ns() >= due_ns:
                self.forget(sequence)

    def forget(self, sequence: TargetSequence) -> None:
        """Wait no longer for a closed sequence's counts."""
        self._closed.pop(sequence, None)
        sequence.is_over = True

    def shut_down(self) -> None:
        """End the draft, and close the link."""
        if self.draft_restart is not None:
            self.draft_restart.close()
            self.draft_restart = None
        if self._send(Shutdown()) and self.link is not None:
            self.link.close()

    # What the draft says

    def drain(self) -> None:
        """Take in what has arrived, then judge whether the draft is silent."""
        end = self._now() + MAX_DRAIN_SECONDS
        for _ in range(MAX_DRAINED):  # a flood must not keep the target from its pass
            if not (self._sequences or self._closed):
                return
            if not self.take(0.0):
                self._judge_silence()
                return
            if self._now() >= end:
                return

    def take(self, timeout: float, waiting: Iterable[TargetSequence] = ()) -> bool:
        """Receive and handle one message; False when none came within `timeout` seconds.

        `waiting`: the sequences that need it.
        """
        if self.link is None:
            return False
        start_ns = self.recorder.now_ns()
        try:
            message = self.link.receive(timeout)
        except Exception as error:  # noqa: BLE001 - the target goes on, whatever it is
            self._lose(first_line(error))
            return False
        if timeout > 0:
            waited_ns = self.recorder.now_ns() - start_ns
            self._silence.waited_ns += waited_ns
            for sequence in waiting:
                if sequence.told is not None:
                    sequence.told.waited_ns += waited_ns
        if message is not None:
            self._handle(message)
        return message is not None

    def _now(self) -> float:
        return self.recorder.now_ns() / 1e9

    @property
    def _incarnation(self) -> int:
        assert self.peer is not None
        return self.peer.incarnation

    @property
    def _not_over(self) -> tuple[int, ...]:
        return *self._sequences, self._next_sequence_id

    def _attach(self, sequence: TargetSequence) -> None:
        if self.link is not None:
            sequence.session.attach(self._incarnation)
            sequence.told = Told(self._now(), self._max_silence_seconds, self._incarnation)
            self._send_opening(sequence)

    def _send_opening(self, sequence: TargetSequence) -> None:
        assert sequence.told is not None
        sequence.told.num_features = sequence.num_held_features(self._incarnation)
        self._silence.asked(self.recorder.now_ns())
        self._send(sequence.opening(self._incarnation, self._not_over))

    def _handle(self, message: Message) -> None:
        if isinstance(message, Candidate):
            self._receive_candidate(message)
            return
        record_message(self.recorder, "receive", message)
        if isinstance(message, Failed):
            self._lose(told_by(message))
        elif isinstance(message, Progress):
            self._receive_counts(message)
        else:
            self._count_nonsense()

    def _receive_candidate(self, message: Candidate) -> None:
        sequence, reception, num_ready = self._sequences.get(message.sequence_id), "stale", 0
        if sequence is not None:  # else it has ended
            if sequence.told is not None and message.incarnation == self._incarnation:
                sequence.told.heard(self._now())
            try:
                reception = sequence.receive(message)
            except PeerProtocolError:
                reception = "refused"
            num_ready = sequence.session.num_candidates
        self._record_candidate(message, reception, num_ready)
        if reception == "refused":
            self._count_nonsense()
        else:
            self._silence = Silence()

    def _record_candidate(self, message: Candidate, reception: str, num_ready: int) -> None:
        record_message(self.recorder, "receive", message, reception=reception, num_ready=num_ready)

    def _count_nonsense(self) -> None:
        self._silence.num_nonsense += 1
        if self._silence.num_nonsense >= MAX_NONSENSE:
            self._lose(f"it sent {MAX_NONSENSE} messages in a row that the protocol forbids")

    def _receive_counts(self, message: Progress) -> None:
        """Take in the counts of a closed sequence, or of an open one at long work; a refusal has none."""
        sequence = self._sequences.get(message.sequence_id) if message.open_ns else None
        now_ns = self.recorder.now_ns()
        silence = Silence() if sequence is None else self._silence.signed(now_ns)
        for closed in [each for each in self._closed if each.sequence_id == message.sequence_id]:
            assert closed.told is not None
            closed.told.is_answered |= message.open_ns > 0
            self.forget(closed)
            sequence = closed
        if sequence is not None:
            sequence.metrics.reported(message)
        if silence is None:
            self._silence.asked(now_ns)
            return
        self._silence = silence
        if sequence is not None:  # the draft works, so nobody has waited in vain
            for each in self._sequences.values():
                if each.told is not None:
                    each.told.waited_ns = 0

    def _judge_silence(self) -> None:
        if not self._sequences:
            return
        waiting = [each for each in self._sequences.values() if each.told is None or not each.told.is_answered]
        num_new_tokens = sum(sequence.session.committed_length for sequence in waiting)
        reason = self._silence.judge(self.recorder.now_ns(), self._max_silence_seconds, num_new_tokens)
        if reason is not None and self.draft_restart is not None:
            logger.warning("amusd: the draft is replaced: %s", reason)
            self._lose(reason)

    def _send(self, message: Message) -> bool:
        """Send to the draft, if there is one; False where there is none, or none any more."""
        if self.link is None:
            return False
        record_message(self.recorder, "send", message)
        try:
            self.link.send(message)
        except Exception as error:  # noqa: BLE001 - the target goes on, whatever it is
            self._lose(self._last_words() or first_line(error))
            return False
        return True

    def _last_words(self) -> str | None:
        assert self.link is not None
        with suppress(Exception):  # the link is of no more use, whatever it is
            for _ in range(MAX_DRAINED):
                message = self.link.receive(0.0)
                if message is None or isinstance(message, Failed):
                    return None if message is None else told_by(message)
        return None

    def _lose(self, reason: str) -> None:
        """Go on without it, and look for the next one if that can be. The first line of the reason counts."""
        reason = (reason.strip().splitlines() or ["it gave no reason"])[0]
        for sequence in (*self._sequences.values(), *self._closed):
            sequence.told = None
            sequence.session.detach()
            sequence.metrics.lost_draft()
            self.recorder.instant("draft_lost", sequence.sequence_id, reason=reason)
        for closed in tuple(self._closed):
            self.forget(closed)
        self._silence = Silence()
        self.losses.append(reason)
        if self.link is not None:
            self.link.drop()
            self.link = None
        if self.draft_restart is not None:
            self.draft_restart.lost(reason)
        self.failure = reason if self.draft_restart is None else self.draft_restart.failure
