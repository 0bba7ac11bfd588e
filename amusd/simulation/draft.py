"""The simulated draft: the loop of `DraftWorker`, around something that says what the draft does with its time.

One for each slot of a batch: they share a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from amusd.policies.verdict_clock import VerdictClock
from amusd.protocol.messages import Close, Message, Open, Progress, Shutdown, Verdict
from amusd.simulation.clock import Listen, Process, VirtualClock, Worker
from amusd.simulation.cost import Costs
from amusd.simulation.device import Device
from amusd.simulation.drafting import Drafting, Work
from amusd.simulation.joint import Step, StepPart
from amusd.simulation.journal import Journal
from amusd.tracing.messages import RECEIVE, SEND
from amusd.types import Role

DraftingFactory = Callable[[Open], Drafting]


@dataclass
class _Sequence:
    """The open sequence and its counters."""

    sequence_id: int
    drafting: Drafting
    drafter_name: str
    opened_ns: int
    busy_ns: int = 0
    wait_ns: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_rollbacks: int = 0
    verdict_clock: VerdictClock = field(default_factory=VerdictClock)


@dataclass
class DraftActor:
    """Receive everything, apply the newest verdict, propose, send. What comes amid a step is seen after it."""

    clock: VirtualClock
    worker: Worker
    send: Callable[[Message], None]
    make_drafting: DraftingFactory
    device: Device[StepPart, Step]
    costs: Costs
    random: Random
    journal: Journal
    target_works: Callable[[], bool]
    _sequence: _Sequence | None = None
    _running: bool = True

    def run(self) -> Process:
        """Until `Shutdown`."""
        while self._running:
            yield from self._listen()
            yield from self._receive()
            if self._sequence is not None and self._sequence.drafting.has_work():
                yield from self._propose(self._sequence)

    def _listen(self) -> Process:
        """Until a message is there; where something can be drafted, only for a verdict that is due before its end."""
        if self.worker.mailbox:
            return
        sequence, start_ns = self._sequence, self.clock.now_ns
        if sequence is None:
            yield Listen(None)
        elif not sequence.drafting.has_work():
            yield Listen(None)
            sequence.wait_ns += self.clock.now_ns - start_ns
            self.journal.span("draft_wait", start_ns, self.clock.now_ns, sequence.sequence_id)
        elif sequence.drafting.can_wait() and (patience_ns := sequence.verdict_clock.patience_ns(start_ns)) > 0:
            yield Listen(patience_ns)

    def _receive(self) -> Process:
        """Take in everything that has arrived; of several verdicts the newest says it all."""
        mailbox = self.worker.mailbox
        newest: Verdict | None = None
        while mailbox and self._running:
            message = mailbox.popleft()
            self.journal.message(RECEIVE, message)
            if isinstance(message, Verdict):
                newest = message
            elif isinstance(message, Open):
                yield from self._open(message)
            elif isinstance(message, Close):
                newest = None
                self._close()
            elif isinstance(message, Shutdown):
                self._running = False
        if newest is not None and self._sequence is not None:
            yield from self._roll_back(self._sequence, newest)

    def _propose(self, sequence: _Sequence) -> Process:
        start_ns, drafting = self.clock.now_ns, sequence.drafting
        part = drafting.step(self.target_works())
        fields = {"num_tokens": part.num_tokens, "length": drafting.length}
        sequence.num_steps += 1
        sequence.num_drafted += part.num_tokens
        step = yield from self.device.together(self.worker, part)
        drafting.stepped(step)
        sequence.verdict_clock.stepped(step.ns)
        self._spent(sequence, "draft_step", start_ns, fields)
        self._offer(sequence)

    def _open(self, opening: Open) -> Process:
        drafting = self.make_drafting(opening)
        self._sequence = _Sequence(opening.sequence_id, drafting, opening.drafter, self.clock.now_ns)
        ns = self.costs.draft_prefill.draw(self.random)
        fields = {"num_tokens": len(opening.token_ids), "fan_out": opening.fan_out}
        yield from self._spend(self._sequence, Work("draft_prefill", ns, fields))

    def _roll_back(self, sequence: _Sequence, verdict: Verdict) -> Process:
        work = sequence.drafting.apply(verdict)
        if work is None:
            return
        sequence.num_rollbacks += work.fields["num_discarded"] > 0
        sequence.verdict_clock.heard(self.clock.now_ns, goes_on=sequence.drafting.can_wait())
        yield from self._spend(sequence, work)
        self._offer(sequence)

    def _spend(self, sequence: _Sequence, work: Work) -> Process:
        start_ns = self.clock.now_ns
        yield from self.device.alone(self.worker, work.ns)
        self._spent(sequence, work.name, start_ns, work.fields)

    def _spent(self, sequence: _Sequence, name: str, start_ns: int, fields: dict[str, Any]) -> None:
        """The time since then, that of the others before its own turn among it."""
        sequence.busy_ns += self.clock.now_ns - start_ns
        self.journal.span(name, start_ns, self.clock.now_ns, sequence.sequence_id, **fields)

    def _offer(self, sequence: _Sequence) -> None:
        candidate = sequence.drafting.offer()
        if candidate is not None:
            self._post(candidate)
            if candidate.token_ids:
                sequence.verdict_clock.sent(self.clock.now_ns)

    def _post(self, message: Message) -> None:
        self.journal.message(SEND, message)
        self.send(message)

    def _close(self) -> None:
        sequence, self._sequence = self._sequence, None
        assert sequence is not None
        self._post(
            Progress(
                role=Role.DRAFT,
                sequence_id=sequence.sequence_id,
                num_steps=sequence.num_steps,
                num_drafted=sequence.num_drafted,
                num_rollbacks=sequence.num_rollbacks,
                num_stale=sequence.drafting.num_stale,
                busy_ns=sequence.busy_ns,
                wait_ns=sequence.wait_ns,
                open_ns=self.clock.now_ns - sequence.opened_ns,
            )
        )
        self.journal.span(
            "sequence", sequence.opened_ns, self.clock.now_ns, sequence.sequence_id, drafter=sequence.drafter_name
        )
