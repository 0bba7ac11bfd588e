"""The simulated draft: the loop of `DraftWorker` over the real session, with guesses that are right where drawn so.

There is one for each slot of a batch; they share a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from amusd.policies.row_cost import RowCost
from amusd.policies.verdict_clock import VerdictClock
from amusd.protocol.draft_session import DraftSession, Guesses
from amusd.protocol.messages import Candidate, Close, Message, Open, Progress, Shutdown, Verdict
from amusd.simulation.batch import Device, Step, StepPart
from amusd.simulation.clock import Journal, Listen, Process, VirtualClock, Worker
from amusd.simulation.cost import Costs
from amusd.simulation.tokens import draft_token
from amusd.tracing.messages import RECEIVE, SEND
from amusd.types import Role


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of the draft's work: what it is called, how long it takes, what its event says."""

    name: str
    ns: int
    fields: dict[str, Any]


class Drafting:
    """As the real rollback manager over a drafter whose probabilities are the same at every position.

    A real one knows where it is sure and where it is not, and spends its rows accordingly. The effects of a piece of
    work hold from its beginning; nobody sees them before its end, when `offer` is asked.
    """

    def __init__(
        self,
        opening: Open,
        places: Sequence[int],
        weights: Sequence[float],
        costs: Costs,
        random: Random,
        step_cost: RowCost,
        tokens_per_step: int = 1,
    ) -> None:
        """Begin an answer. `step_cost`: as known from earlier ones; `tokens_per_step`: of a chain.

        `places`: of the right guess at each position (`guess_places`); `weights`: probability of each place.
        """
        self._session = DraftSession(opening)
        self._prompt_length = len(opening.token_ids)
        self._places = places
        self._weights = weights
        self._costs = costs
        self._random = random
        self._step_cost = step_cost
        self._tokens_per_step = max(opening.tokens_per_message, tokens_per_step)
        self._step_had_root = False
        self._num_sequences = 1

    @property
    def num_stale(self) -> int:
        """Verdicts ignored as stale."""
        return self._session.num_stale

    def has_work(self) -> bool:
        """Whether something can be drafted before the next verdict."""
        return self._session.has_work

    def can_wait(self) -> bool:
        """The target has candidates for several verdicts, so nothing is urgent before the next one."""
        return bool(self._session.root.children) and not self._session.is_chain

    @property
    def length(self) -> int:
        """With all nodes of the tree."""
        return self._session.base + self._session.num_nodes

    def step(self, target_works: bool) -> StepPart:
        """The likeliest nodes, or the next tokens of a chain; only where there is work."""
        session = self._session
        nodes = session.next_nodes(self._step_cost.share_for_each_of(self._num_sequences))
        positions = [node.position + 1 for node in nodes]
        if session.is_chain:
            positions = list(range(positions[0], positions[0] + min(session.room, self._tokens_per_step)))
        session.grow(nodes, [self._guesses(position) for position in positions])
        self._step_had_root = session.root in nodes
        return StepPart(len(positions), is_tree=not session.is_chain, target_works=target_works, random=self._random)

    def stepped(self, step: Step) -> None:
        """What a row costs is learnt from all rows of the step."""
        self._num_sequences = step.num_sequences
        if not self._step_had_root:
            self._step_cost.passed(step.num_rows, step.ns)

    def apply(self, verdict: Verdict) -> Work | None:
        """Take a verdict in; None when it was stale."""
        transition = self._session.preview(verdict)
        if transition is None:
            return None
        self._session.apply(transition)
        is_rollback = transition.num_discarded > 0
        fields: dict[str, Any] = {
            "num_discarded": transition.num_discarded,
            "num_adopted": len(transition.token_ids),
            "committed_length": transition.committed_length,
            "epoch": transition.epoch,
        }
        if not self._session.is_chain:
            fields["kept_steps"] = [node.step for node in transition.kept]
        duration = self._costs.rollback if is_rollback else self._costs.advance
        return Work("rollback" if is_rollback else "advance", duration.draw(self._random), fields)

    def offer(self) -> Candidate | None:
        """The next message for the target."""
        return self._session.offer()

    def _guesses(self, position: int) -> Guesses:
        """The guesses for a position, behind whichever token: nothing behind a wrong one is accepted."""
        index = position - self._prompt_length
        right = self._places[index]
        return [(draft_token(index, place == right, place), weight) for place, weight in enumerate(self._weights)]


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
