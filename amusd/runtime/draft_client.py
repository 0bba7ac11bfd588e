"""A target's client of its draft: it tells the draft about each sequence, and takes in the draft's messages.

A draft that is slow, wrong or gone costs time, never a token. The target waits for a silent draft at most
`max_silence_seconds` in all, and sends reminders at growing intervals, which do not fill the link (`patience.py`). The
draft that replaces a lost one (`connection.py`) is told of all open sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from amusd.errors import PeerProtocolError
from amusd.logs import logger
from amusd.protocol.messages import MAX_FEATURE_BYTES, Candidate, Close, Features, Message, Progress, Refused
from amusd.runtime.client_sequence import ClientSequence
from amusd.runtime.connection import Connection
from amusd.runtime.patience import DraftState
from amusd.tracing.recorder import Recorder

FINAL_PROGRESS_SECONDS = 0.5
"""How long a finished sequence waits for the draft's counts."""
COUNTS_SECONDS = 0.01
"""Longest single wait for the draft's counts; a request may come meanwhile."""
HELLO_SECONDS = 0.005
"""Longest wait for the hello of a draft that listens: a hello in time saves a pass without candidates."""

MAX_DRAINED = 1_000
"""Most messages taken in before a pass."""
MAX_DRAIN_NS = 20_000_000
"""Most nanoseconds of taking in messages before a pass."""


@dataclass
class DraftClient:
    """A target's client of its draft, for all sequences."""

    recorder: Recorder
    connection: Connection = field(default_factory=Connection)
    round_trip_seconds: float = 0.0
    """The link's own delay, which does not count as silence."""
    hello_seconds: float = HELLO_SECONDS
    next_sequence_id: int = 1
    """Higher than any sequence's number so far."""
    _sequences: dict[int, ClientSequence] = field(default_factory=dict)
    """Open sequences that want a draft, by number."""
    _closed: dict[ClientSequence, int] = field(default_factory=dict)
    """Ended sequences whose counts are awaited, each with the wait's end (ns)."""

    def __post_init__(self) -> None:
        self.connection.on_lost = self._lost

    @property
    def patience_seconds(self) -> float:
        """Seconds left to wait for the draft; 0: it is silent."""
        return self.connection.silence.seconds_left(self._max_silence_seconds)

    @property
    def _max_silence_seconds(self) -> float:
        limits = (sequence.max_silence_seconds for sequence in self._sequences.values())
        return max(limits, default=0.0) + self.round_trip_seconds

    def has_draft(self, sequence: ClientSequence) -> bool:
        """Whether a draft works on the sequence and is not silent.

        A draft may have no room for one sequence while it serves others.
        """
        if sequence.at_draft is None or not self.patience_seconds:
            return False
        return sequence.at_draft.waited_ns < (sequence.max_silence_seconds + self.round_trip_seconds) * 1e9

    # To the draft

    def open(self, sequence: ClientSequence) -> None:
        """Open a new sequence at the draft, if the sequence wants one."""
        self.next_sequence_id = sequence.sequence_id + 1
        if not sequence.wish.drafter:
            return
        self._sequences[sequence.sequence_id] = sequence
        if not self.look_for_next():
            self._attach(sequence)

    def look_for_next(self) -> bool:
        """Open all sequences at the draft that replaces a lost one; return whether there is one."""
        if not self.connection.find_next(self.hello_seconds):
            return False
        for number, sequence in sorted(self._sequences.items(), key=lambda pair: -pair[1].session.remaining):
            self._attach(sequence)
            if self.connection.link is None:  # lost again: neither this sequence nor the rest was opened
                return False
            if sequence.has_lost_draft:
                self.recorder.instant("draft_back", number, incarnation=self.connection.incarnation)
            sequence.find_draft()
        return True

    def send_verdict(self, sequence: ClientSequence) -> None:
        """Send the newest verdict; to a silent draft, only as a reminder.

        A draft that never answered may lack the opening, and gets it again. Drafts ignore a second opening.
        """
        state = sequence.at_draft
        if state is None:
            return
        is_due = state.take_reminder(self.recorder.now_ns())
        if is_due and not state.is_answered:
            self._send_opening(sequence)
        if is_due or self.has_draft(sequence):
            if state.is_answered:  # else the draft may have refused the sequence
                self.connection.silence.expect_answer(self.recorder.now_ns())
            self._send(sequence.session.verdict())

    def features_due(self, sequence: ClientSequence, end: int) -> range:
        """Positions below `end` whose features the draft lacks; empty while the draft is silent."""
        state = sequence.at_draft
        return range(state.num_features if state is not None and self.has_draft(sequence) else end, end)

    def send_features(self, sequence: ClientSequence, start: int, features: Tensor) -> None:
        """Send features, bfloat16 [rows, width], of positions from `start` on, as far as the link has room."""
        for rows in torch.split(features, max(1, MAX_FEATURE_BYTES // (2 * features.shape[1]))):
            end, data = start + len(rows), rows.contiguous().view(torch.uint8).numpy().tobytes()
            state, link = sequence.at_draft, self.connection.link
            if state is None or link is None or not link.has_room(2 * len(data)):
                return  # room for as many bytes is kept for other messages
            state.num_features = end
            self._send(Features(sequence.sequence_id, self.connection.incarnation, start, end, data))
            start = end

    def close(self, sequence: ClientSequence) -> None:
        """End a sequence, and await the draft's counts for a moment."""
        number, seconds = sequence.sequence_id, min(FINAL_PROGRESS_SECONDS, self.patience_seconds)
        self._sequences.pop(number, None)
        if sequence.at_draft is not None and self._send(Close(number, self._not_over)):
            self._closed[sequence] = self.recorder.now_ns() + round(seconds * 1e9)
        else:
            sequence.is_over = True
        sequence.session.detach()

    def end_closed(self, *, waits: bool) -> None:
        """Forget closed sequences after their wait for counts; if `waits`, wait for a message first."""
        left_ns = min(self._closed.values(), default=0) - self.recorder.now_ns()
        if waits and left_ns > 0:
            self.take(min(left_ns / 1e9, COUNTS_SECONDS))
        for sequence, due_ns in tuple(self._closed.items()):
            if self.recorder.now_ns() >= due_ns:
                self.forget(sequence)

    def forget(self, sequence: ClientSequence) -> None:
        """Wait no longer for a closed sequence's counts."""
        self._closed.pop(sequence, None)
        sequence.is_over = True

    # From the draft

    def drain(self) -> None:
        """Take in what has arrived, then judge whether the draft is silent."""
        end_ns = self.recorder.now_ns() + MAX_DRAIN_NS
        for _ in range(MAX_DRAINED):  # a flood must not keep the target from its pass
            if not (self._sequences or self._closed):
                return
            if not self.take(0.0):
                self._judge_silence()
                return
            if self.recorder.now_ns() >= end_ns:
                return

    def take(self, timeout: float, waiting: Iterable[ClientSequence] = ()) -> bool:
        """Receive and handle one message; False when none came within `timeout` seconds.

        `waiting`: the sequences that wait.
        """
        start_ns = self.recorder.now_ns()
        message = self.connection.receive(timeout)
        if self.connection.link is None:
            return False
        if timeout > 0:
            waited_ns = self.recorder.now_ns() - start_ns
            self.connection.silence.waited_ns += waited_ns
            for sequence in waiting:
                if sequence.at_draft is not None:
                    sequence.at_draft.waited_ns += waited_ns
        if message is not None:
            self._handle(message)
        return message is not None

    @property
    def _not_over(self) -> tuple[int, ...]:
        return *self._sequences, self.next_sequence_id

    def _attach(self, sequence: ClientSequence) -> None:
        if self.connection.link is not None:
            sequence.session.attach(self.connection.incarnation)
            first_ns = round(self._max_silence_seconds * 1e9)
            sequence.at_draft = DraftState(self.recorder.now_ns(), first_ns, self.connection.incarnation)
            self._send_opening(sequence)

    def _send_opening(self, sequence: ClientSequence) -> None:
        assert sequence.at_draft is not None
        sequence.at_draft.num_features = sequence.num_held_features(self.connection.incarnation)
        self.connection.silence.expect_answer(self.recorder.now_ns())
        self._send(sequence.opening(self.connection.incarnation, self._not_over))

    def _handle(self, message: Message) -> None:
        if isinstance(message, Candidate):
            self._receive_candidate(message)
            return
        self.recorder.message("receive", message)
        if isinstance(message, (Progress, Refused)):
            self._receive_counts(message)
        else:
            self.connection.count_nonsense()

    def _receive_candidate(self, message: Candidate) -> None:
        sequence, reception = self._sequences.get(message.sequence_id), "stale"
        if sequence is not None:  # else it has ended
            if sequence.at_draft is not None and message.incarnation == self.connection.incarnation:
                sequence.at_draft.on_answer(self.recorder.now_ns())
            try:
                reception = sequence.receive(message)
            except PeerProtocolError:
                reception = "refused"
        self.recorder.message("receive", message, reception)
        if reception == "refused":
            self.connection.count_nonsense()
        else:
            self.connection.silence.end()

    def _receive_counts(self, message: Progress | Refused) -> None:
        """Take in the final counts of a closed sequence. Counts of an open one only show that the draft works."""
        number, silence = message.sequence_id, self.connection.silence
        if isinstance(message, Progress) and number in self._sequences:
            if silence.on_sign(self.recorder.now_ns()):  # the draft works, so no wait was in vain
                for each in self._sequences.values():
                    if each.at_draft is not None:
                        each.at_draft.waited_ns = 0
            return
        silence.end()
        for closed in [each for each in self._closed if each.sequence_id == number]:
            if isinstance(message, Progress):
                assert closed.at_draft is not None
                closed.at_draft.is_answered = True
                closed.receive_counts(message)
            self.forget(closed)

    def _judge_silence(self) -> None:
        """Drop a draft that is silent for too long, if another can replace it."""
        if not self._sequences or self.connection.link is None:
            return
        waiting = [each for each in self._sequences.values() if each.at_draft is None or not each.at_draft.is_answered]
        num_new_tokens = sum(sequence.session.committed_length for sequence in waiting)
        now_ns = self.recorder.now_ns()
        reason = self.connection.silence.judge(now_ns, self._max_silence_seconds, num_new_tokens)
        if reason is not None and self.connection.source is not None:
            self.connection.lose(reason)
            logger.warning("the draft is replaced: %s", reason)

    def _send(self, message: Message) -> bool:
        """Send to the draft. Return False if there is none, or if sending loses it."""
        if self.connection.link is None:
            return False
        self.recorder.message("send", message)
        return self.connection.send(message)

    def _lost(self, reason: str) -> None:
        for sequence in (*self._sequences.values(), *self._closed):
            sequence.lose_draft()
            self.recorder.instant("draft_lost", sequence.sequence_id, reason=reason)
        for closed in tuple(self._closed):
            self.forget(closed)
