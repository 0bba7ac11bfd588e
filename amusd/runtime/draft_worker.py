"""The draft's loop: receive, roll back, propose, send. It waits only when its sequence has no room to run ahead.

It knows nothing of schedules: how far it may run ahead, and how many tokens make a message, came with each `Open`.

The target decodes one sequence at a time and numbers them upwards. So an `Open` ends the sequence before it, whose
`Close` was lost; and one that is not above all numbers heard before is a late copy of what is over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from amusd.drafters.base import Drafter, ReferenceDrafter
from amusd.errors import PeerLostError, PeerProtocolError, RankLostError
from amusd.policies.row_cost import DRAFT_ROW_SHARE, RowCost
from amusd.policies.verdict_clock import VerdictClock
from amusd.protocol.draft_session import check_opening
from amusd.protocol.messages import Close, Message, Open, Progress, Shutdown, Verdict
from amusd.runtime.rollback import RollbackManager
from amusd.tracing.messages import RECEIVE, SEND, record_message
from amusd.tracing.recorder import Recorder
from amusd.transport.base import Transport
from amusd.types import Role

logger = logging.getLogger(__name__)

DrafterFactory = Callable[[], Drafter]

IDLE_SECONDS = 1.0
"""How long one wait for a message lasts before the loop looks around again."""
MAX_SHOWN = 40
"""Characters of a name that a peer made up and that goes into a line for people."""
SIGN_SECONDS = 0.1
"""A draft that works for longer and has nothing to send says that it is alive; well below `max_silence_seconds`."""


@dataclass(slots=True)
class _Sequence:
    """The open sequence and its counters."""

    manager: RollbackManager
    drafter_name: str
    opened_ns: int
    busy_ns: int = 0
    wait_ns: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_rollbacks: int = 0
    clock: VerdictClock = field(default_factory=VerdictClock)

    @property
    def number(self) -> int:
        """Its id."""
        return self.manager.session.sequence_id


@dataclass
class DraftWorker:
    """Serves the sequences that the target opens over `link` until it is told to shut down or the target is gone."""

    link: Transport
    drafters: Mapping[str, DrafterFactory]
    """Of chains."""
    tree_drafters: Mapping[str, DrafterFactory]
    incarnation: int
    recorder: Recorder
    num_ids: int = 0
    """Token ids that the models take in: `[0, num_ids)`; 0: any, since there is none that would compute them."""
    num_ignored: int = 0
    """Messages that the protocol forbids, that ask for what is not here (ids which no model takes, a drafter), or that
    name another sequence than the open one: dropped, and they change nothing."""
    _has_complained: bool = False
    _sequence: _Sequence | None = None
    _newest: int = -1
    """Highest number of a sequence that was opened or closed."""
    _chain_drafters: dict[str, Drafter] = field(default_factory=dict)
    _tree_drafters: dict[str, Drafter] = field(default_factory=dict)
    _step_costs: dict[str, RowCost] = field(default_factory=dict)
    """Of trees."""
    _running: bool = True
    _last_sent: float = 0.0
    """Monotonic second."""

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
        return self._sequence is not None and self._sequence.manager.has_work

    def step(self) -> None:
        """Receive, roll back, propose, send. Raises `PeerLostError`."""
        self._receive()
        sequence = self._sequence
        if sequence is not None and sequence.manager.has_work:
            self._propose(sequence)
            self._send(sequence)
            if time.monotonic() - self._last_sent >= SIGN_SECONDS:
                self._post(self._progress(sequence))

    def _receive(self) -> None:
        """Take in everything that has arrived; wait for something when there is nothing to draft."""
        verdicts: dict[int, Verdict] = {}
        message = self.link.receive(self._patience()) if self.has_work else self._wait()
        while message is not None:
            record_message(self.recorder, RECEIVE, message)
            if isinstance(message, Verdict):
                # Cumulative: only the newest one of a sequence needs to be applied.
                verdicts[message.sequence_id] = message
            else:
                if isinstance(message, Close):
                    verdicts.pop(message.sequence_id, None)
                self._handle(message)
            message = self.link.receive(0.0) if self._running else None
        for verdict in verdicts.values():
            self._roll_back(verdict)

    def _patience(self) -> float:
        """Seconds to wait for a verdict that is due before the next step would end."""
        if self._sequence is None or not self._sequence.manager.can_wait:
            return 0.0
        return self._sequence.clock.patience_ns(time.monotonic_ns()) / 1e9

    def _wait(self) -> Message | None:
        """For a message, because nothing can be drafted before one comes."""
        start_ns = time.monotonic_ns()
        message = self.link.receive(IDLE_SECONDS)
        end_ns = time.monotonic_ns()
        if self._sequence is not None:
            self._sequence.wait_ns += end_ns - start_ns
            self.recorder.span("draft_wait", start_ns, end_ns, self._sequence.number)
        return message

    def _handle(self, message: Message) -> None:
        if isinstance(message, Open):
            self._open(message)
        elif isinstance(message, Close):
            self._close(message)
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
        start_ns = time.monotonic_ns()
        self._sequence = sequence = _Sequence(self._manage(opening), opening.drafter, start_ns)
        self._account(sequence, "draft_prefill", start_ns, num_tokens=len(opening.token_ids), fan_out=opening.fan_out)

    def _say_once(self, complaint: str) -> None:
        """To people. The first is news; the target asks again and again, and that must not fill the log."""
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

    def _roll_back(self, verdict: Verdict) -> None:
        sequence = self._open_one(verdict.sequence_id)
        if sequence is None:
            self.num_ignored += 1
            return
        start_ns = time.monotonic_ns()
        try:
            self._check_ids(verdict.token_ids)
            transition = sequence.manager.apply(verdict)
        except PeerProtocolError:
            self.num_ignored += 1
            return
        if transition is None:
            return
        sequence.num_rollbacks += transition.num_discarded > 0
        sequence.clock.heard(start_ns, goes_on=sequence.manager.can_wait)
        self._account(
            sequence,
            "rollback" if transition.num_discarded else "advance",
            start_ns,
            num_discarded=transition.num_discarded,
            num_adopted=len(transition.token_ids),
            committed_length=transition.committed_length,
            epoch=transition.epoch,
            **({} if sequence.manager.session.is_chain else {"kept_steps": [node.step for node in transition.kept]}),
        )
        # The verdict may leave nothing to draft (no room); the target should hear that at once.
        self._send(sequence)

    def _propose(self, sequence: _Sequence) -> None:
        start_ns = time.monotonic_ns()
        num_tokens = sequence.manager.propose()
        step_ns = time.monotonic_ns() - start_ns
        sequence.num_steps += 1
        sequence.num_drafted += num_tokens
        sequence.clock.stepped(step_ns)
        sequence.manager.stepped(step_ns)
        self._account(sequence, "draft_step", start_ns, num_tokens=num_tokens, length=sequence.manager.length)

    def _send(self, sequence: _Sequence) -> None:
        candidate = sequence.manager.offer()
        if candidate is not None:
            self._post(candidate)
            if candidate.token_ids:
                sequence.clock.sent(time.monotonic_ns())

    def _close(self, message: Close) -> None:
        self._newest = max(self._newest, message.sequence_id)
        sequence = self._open_one(message.sequence_id)
        if sequence is None:
            self.num_ignored += 1
            return
        progress = self._progress(sequence)
        self._forget()
        record_message(self.recorder, SEND, progress)
        self.recorder.flush()  # the target may read the events as soon as it has the counts
        self.link.send(progress)

    def _progress(self, sequence: _Sequence) -> Progress:
        return Progress(
            role=Role.DRAFT,
            sequence_id=sequence.number,
            num_steps=sequence.num_steps,
            num_drafted=sequence.num_drafted + sequence.manager.num_looked_up,
            num_rollbacks=sequence.num_rollbacks,
            num_stale=sequence.manager.session.num_stale,
            busy_ns=sequence.busy_ns,
            wait_ns=sequence.wait_ns,
            open_ns=time.monotonic_ns() - sequence.opened_ns,
        )

    def _post(self, message: Message) -> None:
        record_message(self.recorder, SEND, message)
        self.link.send(message)
        self._last_sent = time.monotonic()

    def _is_over(self, number: int) -> bool:
        """Or has begun: it or one behind it was heard of before."""
        return number <= self._newest

    def _open_one(self, number: int) -> _Sequence | None:
        """The open sequence, if that is its number."""
        return self._sequence if self._sequence is not None and self._sequence.number == number else None

    def _forget(self) -> None:
        """The open sequence, if there is one."""
        sequence, self._sequence = self._sequence, None
        if sequence is None:
            return
        self.recorder.span(
            "sequence", sequence.opened_ns, time.monotonic_ns(), sequence.number, drafter=sequence.drafter_name
        )
        sequence.manager.close()

    def _account(self, sequence: _Sequence, name: str, start_ns: int, **fields: object) -> None:
        end_ns = time.monotonic_ns()
        sequence.busy_ns += end_ns - start_ns
        self.recorder.span(name, start_ns, end_ns, sequence.number, **fields)
