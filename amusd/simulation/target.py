"""The simulated target: the loop of `TargetWorker`, with a pass that only takes time.

One for each slot of a batch: they share a device, the rule by which its passes begin, and the answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field
from random import Random

from amusd.errors import InvariantError
from amusd.policies.base import Policy, Verify, Wait, because
from amusd.policies.observer import Observer
from amusd.protocol.messages import Candidate, Close, Message, Open, Progress, Shutdown
from amusd.protocol.target_session import Reception, TargetSession
from amusd.protocol.verification import Block
from amusd.simulation.batch import Device, Gathering, Intake, Pass, PassPart
from amusd.simulation.clock import Busy, Journal, Listen, Process, Spent, VirtualClock, Worker
from amusd.simulation.cost import Costs
from amusd.simulation.tokens import target_token, vocab_size
from amusd.tracing.messages import RECEIVE, SEND
from amusd.tracing.metrics import DraftCounts
from amusd.tracing.tally import Tally
from amusd.types import FinishReason

PROMPT_LENGTH = 1
"""Prompts cost what `Costs` says, whatever their length."""

_INCARNATION = 1
_DRAFTER = "simulated"


@dataclass
class TargetActor:
    """Drain, decide, verify, commit, answer: one answer after another."""

    clock: VirtualClock
    worker: Worker
    send: Callable[[Message], None]
    intake: Intake
    device: Device[PassPart, Pass]
    gathering: Gathering
    policy: Policy
    max_candidates: int
    """That a pass can take."""
    has_draft: bool
    costs: Costs
    random: Random
    journal: Journal
    draft_works: Callable[[], bool]
    _observer: Observer = field(default_factory=Observer)
    _decision: Verify = field(default_factory=lambda: Verify(0))

    def run(self) -> Process:
        """Answers as long as there are any, then `Shutdown`."""
        while (taken := self.intake.take(PROMPT_LENGTH)) is not None:
            sequence_id, answer, counts = taken
            yield from self._decode(sequence_id, len(answer), counts)
        self._post(Shutdown())

    def _decode(self, sequence_id: int, num_tokens: int, counts: Tally) -> Process:
        session = TargetSession(
            sequence_id=sequence_id,
            prompt=(0,) * PROMPT_LENGTH,
            max_length=PROMPT_LENGTH + num_tokens,
            vocab_size=vocab_size(num_tokens, self.policy.fan_out),
            fan_out=self.policy.fan_out,
        )
        self._observer.open(_DRAFTER if self.has_draft else None, has_tree=self.policy.fan_out > 1)
        self.gathering.enter(sequence_id, self.worker)
        yield from self._open(session, counts)
        while session.remaining:
            block = yield from self._next_block(session, counts)
            yield from self._verify(session, block, counts)
        self.gathering.leave(sequence_id)
        yield from self._close(session, counts)

    def _open(self, session: TargetSession, counts: Tally) -> Process:
        """The prompt goes out first, so that the draft prefills while the target does."""
        if self.has_draft:
            session.attach(_INCARNATION)
            self._post(
                Open(
                    sequence_id=session.sequence_id,
                    incarnation=_INCARNATION,
                    token_ids=session.committed,
                    max_length=session.max_length,
                    drafter=_DRAFTER,
                    max_lookahead=self.policy.max_lookahead,
                    tokens_per_message=self.policy.tokens_per_message,
                    fan_out=self.policy.fan_out,
                    rows_per_step=self.policy.rows_per_step,
                )
            )
        start_ns = self.clock.now_ns
        yield from self.device.alone(self.worker, self.costs.target_prefill.draw(self.random))
        counts.prefill_ns = self.clock.now_ns - start_ns
        self.journal.span("target_prefill", start_ns, self.clock.now_ns, session.sequence_id)

    def _next_block(self, session: TargetSession, counts: Tally) -> Generator[Spent, None, Block]:
        """Drain what has arrived and let the policy decide, until the pass begins."""
        ready_ns = self.clock.now_ns
        limit = self._limit(session)
        while True:
            self._drain(session, counts)
            waited_ns = self.clock.now_ns - ready_ns
            decision = self.policy.decide(self._observer.view(session, max_candidates=limit, waited_ns=waited_ns))
            waits = isinstance(decision, Wait)
            if self.gathering.decide(session.sequence_id, waits=waits):
                self._decision = Verify(session.num_candidates) if isinstance(decision, Wait) else decision
                return self._begin(session, self._decision, limit)
            start_ns, num_candidates = self.clock.now_ns, session.num_candidates
            yield Listen(math.ceil(decision.seconds * 1e9) if isinstance(decision, Wait) else None)
            if self.worker.mailbox:
                self._handle(session, self.worker.mailbox.popleft(), counts)
            waited_ns = self.clock.now_ns - start_ns
            if waits:
                self._observer.waited(waited_ns, num_before=num_candidates, num_after=session.num_candidates)
            counts.wait_ns += waited_ns
            self.journal.span("target_wait", start_ns, self.clock.now_ns, session.sequence_id, **because(decision))

    def _begin(self, session: TargetSession, decision: Verify, limit: int) -> Block:
        """As the real one, at a position where a pass has room for several paths."""
        return session.begin(
            min(decision.num_candidates, limit),
            num_tracks=self.policy.breadth,
            max_rows=self.max_candidates + 1,
            min_chance=decision.min_chance,
        )

    def _limit(self, session: TargetSession) -> int:
        """Candidates that the next pass can take."""
        return min(session.remaining - 1, self.max_candidates)

    def _verify(self, session: TargetSession, block: Block, counts: Tally) -> Process:
        """One pass; accept, commit, and answer unless the sequence is complete."""
        ready_ns = self.clock.now_ns
        max_candidates = self._limit(session)
        part = PassPart(len(block.token_ids) - 1, self.draft_works())
        done = yield from self.device.together(self.worker, part, self.gathering)
        pass_ns, host_ns = done.ns, done.host_ns
        start_ns = self.clock.now_ns - pass_ns
        counts.wait_ns += start_ns - ready_ns
        self._drain(session, counts)
        token_ids, num_accepted = _accept(session, block)
        outcome = session.commit(token_ids, num_accepted)
        self.journal.span(
            "target_pass",
            start_ns,
            start_ns + pass_ns,
            session.sequence_id,
            max_candidates=min(max_candidates, self.policy.max_lookahead),
            committed_length=session.committed_length,
            num_ready=session.num_candidates,
            **asdict(outcome),
            **because(self._decision),
        )
        tells_draft = self._decision.tells_draft
        self._observer.passed(
            start_ns,
            start_ns + pass_ns,
            outcome,
            rests=not tells_draft,
            num_rows=done.num_rows,
            num_sequences=done.num_sequences,
        )
        before_ns = round(host_ns * self.costs.host_before_verdict)
        yield Busy(before_ns)
        counts.passed(self.clock.now_ns, pass_ns, outcome)
        counts.host_ns += before_ns
        if session.remaining:
            if session.attached and tells_draft:
                self._post(session.verdict())
            yield Busy(host_ns - before_ns)
            counts.host_ns += host_ns - before_ns

    def _close(self, session: TargetSession, counts: Tally) -> Process:
        """Wait for the draft's own counts: it answers every `Close`."""
        self.journal.span(
            "sequence",
            counts.start_ns,
            counts.last_ns,
            session.sequence_id,
            policy=type(self.policy).__name__,
            max_lookahead=self.policy.max_lookahead,
            drafter=_DRAFTER if self.has_draft else None,
            num_prompt_tokens=PROMPT_LENGTH,
            finish_reason=FinishReason.LENGTH.value,
        )
        if not self.has_draft:
            return
        self._post(Close(session.sequence_id, FinishReason.LENGTH))
        while counts.draft is None:
            yield Listen(None)
            self._handle(session, self.worker.mailbox.popleft(), counts)

    def _post(self, message: Message) -> None:
        self.journal.message(SEND, message)
        self.send(message)

    def _drain(self, session: TargetSession, counts: Tally) -> None:
        mailbox = self.worker.mailbox
        while mailbox:
            self._handle(session, mailbox.popleft(), counts)

    def _handle(self, session: TargetSession, message: Message, counts: Tally) -> None:
        if isinstance(message, Candidate):
            reception = session.receive(message)
            if reception is Reception.FOREIGN:
                raise InvariantError(f"a simulated candidate behind {message.base} tokens has another prefix")
            counts.num_stale_candidates += reception is not Reception.TAKEN
            self.journal.message(RECEIVE, message, reception=reception.value, num_ready=session.num_candidates)
        elif isinstance(message, Progress):
            self.journal.message(RECEIVE, message)
            counts.draft = DraftCounts.of(message)


def _accept(session: TargetSession, block: Block) -> tuple[tuple[int, ...], int]:
    """What a pass commits, and how many of it were candidates.

    The candidates that equal the target's tokens, then the target's own where it scored one more position.
    """
    start = block.start + 1 - PROMPT_LENGTH
    if block.alternatives:
        token_ids = tuple(target_token(start + depth) for depth in range(len(block.token_ids)))
        num_accepted = len(block.path_along(token_ids)) - 1
        return token_ids[: num_accepted + 1], num_accepted
    judged, num_scored = session.candidates_to_judge(), len(block.candidates) + 1
    num_accepted = 0
    while num_accepted < len(judged) and judged[num_accepted] == target_token(start + num_accepted):
        num_accepted += 1
    return tuple(target_token(start + i) for i in range(min(num_accepted + 1, num_scored))), num_accepted
