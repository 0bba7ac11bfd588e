"""The draft's loop: receive, roll back, propose, send. It waits only when no sequence has room to run ahead.

It knows nothing of schedules: how far it may run ahead, and how many tokens make a message, came with each `Open`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from amusd.drafters.base import Drafter, ReferenceDrafter, SamplingDrafter
from amusd.drafters.tree import TreeDrafter
from amusd.errors import PeerLostError, PeerProtocolError
from amusd.policies.row_cost import DRAFT_ROW_SHARE, RowCost
from amusd.policies.verdict_clock import VerdictClock
from amusd.protocol.draft_session import Transition
from amusd.protocol.drafting import check_opening
from amusd.protocol.messages import Close, Message, Open, Progress, Shutdown, Verdict
from amusd.protocol.tree_draft_session import Adoption
from amusd.runtime.branch_manager import BranchManager
from amusd.runtime.rollback import RollbackManager
from amusd.tracing.messages import RECEIVE, SEND, record_message
from amusd.tracing.recorder import Recorder
from amusd.transport.base import Transport
from amusd.types import Role

_Made = TypeVar("_Made")
DrafterFactory = Callable[[], Drafter]
TreeDrafterFactory = Callable[[], TreeDrafter]

IDLE_SECONDS = 1.0
"""How long one wait for a message lasts before the loop looks around again."""
MAX_SEQUENCES = 64
"""Sequences open at once at most: each holds a cache."""
MAX_CLOSED = 1024
"""Sequences that were closed last, and that a late copy of their opening must not open again."""
SIGN_SECONDS = 0.1
"""A draft that works for longer and has nothing to send says that it is alive; well below `max_silence_seconds`."""


@dataclass(slots=True)
class _Sequence:
    """One open sequence and its counters."""

    manager: RollbackManager | BranchManager
    drafter_name: str
    opened_ns: int
    busy_ns: int = 0
    wait_ns: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_rollbacks: int = 0
    clock: VerdictClock = field(default_factory=VerdictClock)


@dataclass
class DraftWorker:
    """Serves the sequences that the target opens over `link` until it is told to shut down or the target is gone."""

    link: Transport
    drafters: Mapping[str, DrafterFactory]
    tree_drafters: Mapping[str, TreeDrafterFactory]
    incarnation: int
    recorder: Recorder
    num_ids: int = 0
    """Token ids that the models take in: `[0, num_ids)`; 0: any, since there is none that would compute them."""
    num_ignored: int = 0
    """Messages that the protocol forbids, that hold ids which no model here takes, or that name an unknown sequence:
    dropped, and they change nothing."""
    _sequences: dict[int, _Sequence] = field(default_factory=dict)
    _closed: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_CLOSED))
    _idle_drafters: dict[str, list[Drafter]] = field(default_factory=dict)
    _idle_tree_drafters: dict[str, list[TreeDrafter]] = field(default_factory=dict)
    _step_costs: dict[str, RowCost] = field(default_factory=dict)
    _running: bool = True
    _last_sent: float = 0.0
    """Monotonic second."""

    def run(self) -> None:
        """Step by step, until `Shutdown` or the end of the link."""
        self.prepare()
        try:
            while self._running:
                self.step()
        except PeerLostError:
            # The target decides when a run ends; its going away is one way of saying so.
            self.recorder.instant("target_gone", -1)
        finally:
            for sequence_id in list(self._sequences):
                self._forget(sequence_id)
            self.recorder.flush()

    def prepare(self) -> None:
        """Make what the first sequence needs: a drafter may have to prepare its device."""
        self._idle_drafters = {name: [make()] for name, make in self.drafters.items()}
        self._idle_tree_drafters = {name: [make()] for name, make in self.tree_drafters.items()}

    @property
    def has_work(self) -> bool:
        """A sequence has room to run ahead."""
        return any(sequence.manager.has_work for sequence in self._sequences.values())

    def step(self) -> None:
        """Receive, roll back, propose, send. Raises `PeerLostError`."""
        self._receive()
        sequence = self._take_turn()
        if sequence is not None:
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
        """Seconds to wait for a verdict that is due before the next step would end; where one sequence is open."""
        sequences = list(self._sequences.values())
        if len(sequences) != 1 or not sequences[0].manager.can_wait:
            return 0.0
        return sequences[0].clock.patience_ns(time.monotonic_ns()) / 1e9

    def _wait(self) -> Message | None:
        """For a message, because nothing can be drafted before one comes."""
        start_ns = time.monotonic_ns()
        message = self.link.receive(IDLE_SECONDS)
        end_ns = time.monotonic_ns()
        for sequence_id, sequence in self._sequences.items():
            sequence.wait_ns += end_ns - start_ns
            self.recorder.span("draft_wait", start_ns, end_ns, sequence_id)
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
        is_known = opening.sequence_id in self._sequences or opening.sequence_id in self._closed
        if opening.incarnation != self.incarnation or is_known or len(self._sequences) >= MAX_SEQUENCES:
            self.num_ignored += 1
            return
        biased = (token_id for token_id, _ in opening.distribution.logit_bias)
        try:
            check_opening(opening)
            self._check_ids((*opening.token_ids, *opening.reference, *biased))
        except PeerProtocolError:
            self.num_ignored += 1
            return
        start_ns = time.monotonic_ns()
        sequence = _Sequence(self._manage(opening), opening.drafter, start_ns)
        self._sequences[opening.sequence_id] = sequence
        self._account(sequence, "draft_prefill", start_ns, num_tokens=len(opening.token_ids))

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        """Raises `PeerProtocolError`: a model would end the process, or a GPU's context, on an id beyond its own."""
        if self.num_ids and max(token_ids, default=0) >= self.num_ids:
            raise PeerProtocolError(f"token ids must be below {self.num_ids}")

    def _manage(self, opening: Open) -> RollbackManager | BranchManager:
        name = opening.drafter
        if opening.fan_out:
            tree_drafter = _take(self._idle_tree_drafters, self.tree_drafters, name)
            if isinstance(tree_drafter, ReferenceDrafter):
                tree_drafter.set_reference((*opening.token_ids, *opening.reference))
            tree_drafter.set_distribution(opening.distribution)
            return BranchManager(opening, tree_drafter, self._step_costs.setdefault(name, RowCost(DRAFT_ROW_SHARE)))
        drafter = _take(self._idle_drafters, self.drafters, name)
        if isinstance(drafter, ReferenceDrafter):
            drafter.set_reference((*opening.token_ids, *opening.reference))
        if isinstance(drafter, SamplingDrafter):
            drafter.set_distribution(opening.distribution)
        return RollbackManager(opening, drafter)

    def _roll_back(self, verdict: Verdict) -> None:
        sequence = self._sequences.get(verdict.sequence_id)
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
            **_foreseen(transition),
        )
        # The verdict may leave nothing to draft (no room); the target should hear that at once.
        self._send(sequence)

    def _take_turn(self) -> _Sequence | None:
        """The sequence that has waited longest for a step, among those that may run further ahead."""
        for sequence_id, sequence in self._sequences.items():
            if sequence.manager.has_work:
                # Move it to the end, so that sequences take turns.
                self._sequences[sequence_id] = self._sequences.pop(sequence_id)
                return sequence
        return None

    def _propose(self, sequence: _Sequence) -> None:
        start_ns = time.monotonic_ns()
        num_tokens = sequence.manager.propose()
        step_ns = time.monotonic_ns() - start_ns
        sequence.num_steps += 1
        sequence.num_drafted += num_tokens
        sequence.clock.stepped(step_ns)
        if isinstance(sequence.manager, BranchManager):
            sequence.manager.stepped(step_ns)
        self._account(sequence, "draft_step", start_ns, num_tokens=num_tokens, length=sequence.manager.length)

    def _send(self, sequence: _Sequence) -> None:
        candidate = sequence.manager.offer()
        if candidate is not None:
            self._post(candidate)
            if candidate.token_ids:
                sequence.clock.sent(time.monotonic_ns())

    def _close(self, message: Close) -> None:
        self._closed.append(message.sequence_id)
        sequence = self._sequences.get(message.sequence_id)
        if sequence is None:
            self.num_ignored += 1
            return
        progress = self._progress(sequence)
        self._forget(message.sequence_id)
        record_message(self.recorder, SEND, progress)
        self.recorder.flush()  # the target may read the events as soon as it has the counts
        self.link.send(progress)

    def _progress(self, sequence: _Sequence) -> Progress:
        return Progress(
            role=Role.DRAFT,
            sequence_id=sequence.manager.session.sequence_id,
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

    def _forget(self, sequence_id: int) -> None:
        sequence = self._sequences.pop(sequence_id)
        self.recorder.span(
            "sequence", sequence.opened_ns, time.monotonic_ns(), sequence_id, drafter=sequence.drafter_name
        )
        manager = sequence.manager
        manager.close()
        if isinstance(manager, BranchManager):
            self._idle_tree_drafters[sequence.drafter_name].append(manager.drafter)
        else:
            self._idle_drafters[sequence.drafter_name].append(manager.drafter)

    def _account(self, sequence: _Sequence, name: str, start_ns: int, **fields: object) -> None:
        end_ns = time.monotonic_ns()
        sequence.busy_ns += end_ns - start_ns
        self.recorder.span(name, start_ns, end_ns, sequence.manager.session.sequence_id, **fields)


def _take(idle: Mapping[str, list[_Made]], makers: Mapping[str, Callable[[], _Made]], name: str) -> _Made:
    """An idle drafter of that name, or a new one. Raises `PeerProtocolError` for a name that there is not."""
    if name not in makers:
        raise PeerProtocolError(f"the target asks for drafter {name!r}, which this draft does not have")
    return idle[name].pop() if idle[name] else makers[name]()


def _foreseen(change: Transition | Adoption) -> dict[str, list[int]]:
    """Of a tree, for the record: in which step each token was guessed that the verdict confirmed."""
    return {"kept_steps": [node.step for node in change.kept]} if isinstance(change, Adoption) else {}
