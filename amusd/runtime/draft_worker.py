"""The draft's loop: receive, roll back, propose, send. It waits only when its sequence has no room to run ahead.

It knows nothing of schedules: how far it may run ahead, and how many tokens make a message, came with each `Open`.

The target decodes one sequence at a time and numbers them upwards. So an `Open` ends the sequence before it, whose
`Close` was lost; and one that is not above all numbers heard before is a late copy of what is over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from amusd.drafters.base import Drafter, ReferenceDrafter
from amusd.errors import PeerLostError, PeerProtocolError, RankLostError
from amusd.policies.row_cost import DRAFT_ROW_SHARE, RowCost
from amusd.protocol.draft_session import check_opening
from amusd.protocol.messages import Close, Message, Open, Shutdown, Verdict
from amusd.runtime.draft_sequence import DraftSequence
from amusd.runtime.rollback import RollbackManager
from amusd.tracing.messages import RECEIVE, SEND, record_message
from amusd.tracing.recorder import Recorder
from amusd.transport.base import Transport

logger = logging.getLogger(__name__)

DrafterFactory = Callable[[], Drafter]

IDLE_SECONDS = 1.0
"""How long one wait for a message lasts before the loop looks around again."""
MAX_SHOWN = 40
"""Characters of a name that a peer made up and that goes into a line for people."""
SIGN_NS = 100_000_000
"""A draft that works for longer and has nothing to send says that it is alive; well below `max_silence_seconds`."""


@dataclass
class DraftWorker:
    """Serves the sequences that the target opens over `link` until it is told to shut down or the target is gone."""

    link: Transport
    drafters: Mapping[str, DrafterFactory]
    """Makers of drafters of chains, by name."""
    tree_drafters: Mapping[str, DrafterFactory]
    """Makers of drafters of trees, by name."""
    incarnation: int
    recorder: Recorder
    num_ids: int = 0
    """Token ids that the models take in: `[0, num_ids)`; 0: any, since there is none that would compute them."""
    num_ignored: int = 0
    """Messages that the protocol forbids, that ask for what is not here (ids which no model takes, a drafter), or that
    name another sequence than the open one: dropped, and they change nothing."""
    _has_complained: bool = False
    _sequence: DraftSequence | None = None
    _newest: int = -1
    """Highest number of a sequence that was opened or closed."""
    _chain_drafters: dict[str, Drafter] = field(default_factory=dict)
    _tree_drafters: dict[str, Drafter] = field(default_factory=dict)
    _step_costs: dict[str, RowCost] = field(default_factory=dict)
    """What rows of a tree step cost, by drafter."""
    _running: bool = True
    _last_sent_ns: int = 0

    def run(self) -> None:
        """Step by step, until `Shutdown` or the end of the link. Raises `RankLostError`: this draft is no more."""
        self.prepare()
        try:
            while self._running:
                self.step()
        except RankLostError:
            raise
        except PeerLostError:
            # The target decides when a run ends; its going away is one way of saying so.
            self.recorder.instant("target_gone", -1)
        finally:
            self._forget()
            self.recorder.flush()

    def prepare(self) -> None:
        """Make the drafters before the first sequence needs one: a GPU takes seconds to prepare. Idempotent."""
        if self._chain_drafters or self._tree_drafters:
            return
        self._chain_drafters = {name: make() for name, make in self.drafters.items()}
        self._tree_drafters = {name: make() for name, make in self.tree_drafters.items()}

    @property
    def has_work(self) -> bool:
        """The sequence has room to run ahead."""
        return self._sequence is not None and self._sequence.has_work

    def step(self) -> None:
        """Receive, roll back, propose, send. Raises `PeerLostError`."""
        self._receive()
        sequence = self._sequence
        if sequence is None:
            return
        if self._roll_back(sequence):
            self._send(sequence)  # at once: the target should hear what was prepared, or that nothing is left to draft
        if sequence.has_work:
            sequence.propose()
            self._send(sequence)
            if self.recorder.now_ns() - self._last_sent_ns >= SIGN_NS:
                self._post(sequence.progress())

    def _receive(self) -> None:
        """Take in everything that has arrived; wait for something when there is nothing to draft."""
        sequence = self._sequence
        if sequence is not None and sequence.has_work:
            message = self.link.receive(sequence.patience_seconds)
        else:
            message = self._wait()
        while message is not None:
            record_message(self.recorder, RECEIVE, message)
            self._handle(message)
            message = self.link.receive(0.0) if self._running else None

    def _wait(self) -> Message | None:
        """Wait for a message, because nothing can be drafted before one comes."""
        start_ns = self.recorder.now_ns()
        message = self.link.receive(IDLE_SECONDS)
        if self._sequence is not None:
            self._sequence.waited(start_ns, self.recorder.now_ns())
        return message

    def _handle(self, message: Message) -> None:
        sequence = self._open_one(getattr(message, "sequence_id", -1))
        if isinstance(message, Open):
            self._open(message)
        elif isinstance(message, Verdict) and sequence is not None:
            sequence.verdict = message
        elif isinstance(message, Close):
            self._close(message, sequence)
        elif isinstance(message, Shutdown):
            self._running = False
        else:
            self.num_ignored += 1

    def _open(self, opening: Open) -> None:
        if opening.incarnation != self.incarnation or self._is_over(opening.sequence_id):
            self.num_ignored += 1
            return
        biased = (token_id for token_id, _ in opening.distribution.logit_bias)
        try:
            check_opening(opening)
            self._check_ids((*opening.token_ids, *opening.reference, *biased))
            self._check_drafter(opening)
        except PeerProtocolError as error:
            self.num_ignored += 1
            self._say_once(f"opened no sequence: {error}")
            return
        self._forget()
        self._newest = opening.sequence_id
        start_ns = self.recorder.now_ns()
        try:
            manager = self._manage(opening)
        except ValueError as error:  # more than its model takes: the target goes on alone
            self.num_ignored += 1
            self._say_once(f"opened no sequence: {error}")
            return
        sequence = DraftSequence(manager, opening.drafter, self.recorder, start_ns)
        sequence.account("draft_prefill", start_ns, num_tokens=len(opening.token_ids), fan_out=opening.fan_out)
        self._sequence = sequence

    def _say_once(self, complaint: str) -> None:
        """Warn people once: the target asks again and again, and that must not fill the log."""
        logger.log(logging.DEBUG if self._has_complained else logging.WARNING, "%s", complaint)
        self._has_complained = True

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        """Raises `PeerProtocolError`: a model would end the process, or a GPU's context, on an id beyond its own."""
        if self.num_ids and max(token_ids, default=0) >= self.num_ids:
            raise PeerProtocolError(f"token ids must be below {self.num_ids}")

    def _check_drafter(self, opening: Open) -> None:
        """Raises `PeerProtocolError` for a name that there is not."""
        names = self.drafters if opening.fan_out == 1 else self.tree_drafters
        if opening.drafter not in names:
            kind = "a drafter" if opening.fan_out == 1 else "a drafter of trees"
            asked = f"the target asks for {kind} {opening.drafter[:MAX_SHOWN]!r}"
            raise PeerProtocolError(f"{asked}; this draft has: {', '.join(names) or 'none'}")

    def _manage(self, opening: Open) -> RollbackManager:
        name = opening.drafter
        drafter = (self._chain_drafters if opening.fan_out == 1 else self._tree_drafters)[name]
        if isinstance(drafter, ReferenceDrafter):
            drafter.set_reference((*opening.token_ids, *opening.reference))
        drafter.set_distribution(opening.distribution)
        step_cost = None if opening.fan_out == 1 else self._step_costs.setdefault(name, RowCost(DRAFT_ROW_SHARE))
        return RollbackManager(opening, drafter, step_cost)

    def _roll_back(self, sequence: DraftSequence) -> bool:
        """Bring the sequence in line with the verdict that has come; whether there was one to follow."""
        try:
            self._check_ids(() if sequence.verdict is None else sequence.verdict.token_ids)
            return sequence.roll_back()
        except PeerProtocolError:
            sequence.verdict = None
            self.num_ignored += 1
            return False

    def _send(self, sequence: DraftSequence) -> None:
        candidate = sequence.offer()
        if candidate is not None:
            self._post(candidate)
            sequence.sent(candidate)

    def _close(self, message: Close, sequence: DraftSequence | None) -> None:
        self._newest = max(self._newest, message.sequence_id)
        if sequence is None:
            self.num_ignored += 1
            return
        progress = sequence.progress()
        self._forget()
        record_message(self.recorder, SEND, progress)
        self.recorder.flush()  # the target may read the events as soon as it has the counts
        self.link.send(progress)

    def _post(self, message: Message) -> None:
        record_message(self.recorder, SEND, message)
        self.link.send(message)
        self._last_sent_ns = self.recorder.now_ns()

    def _is_over(self, sequence_id: int) -> bool:
        """The sequence is over or has begun: it or a later one was heard of before."""
        return sequence_id <= self._newest

    def _open_one(self, sequence_id: int) -> DraftSequence | None:
        """The open sequence, if that is its id."""
        return self._sequence if self._sequence is not None and self._sequence.sequence_id == sequence_id else None

    def _forget(self) -> None:
        """End the open sequence, if there is one."""
        sequence, self._sequence = self._sequence, None
        if sequence is not None:
            sequence.close()
