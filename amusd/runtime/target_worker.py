"""The target's loop: drain, decide, verify, commit, answer.

It never waits for an acknowledgement, and it can always go on alone: a draft that is slow, wrong or gone costs time,
never a token. A draft that is gone is replaced (`succession.py`): the next one is told what is committed by then.

The three modes are this loop under three policies (`amusd/policies`).
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import asdict, dataclass, field, replace

from amusd.config import GREEDY, Distribution
from amusd.errors import PeerLostError, PeerProtocolError
from amusd.models.language_model import KVCache, LanguageModel
from amusd.policies.base import Policy, Verify, Wait, because
from amusd.policies.observer import Observer
from amusd.policies.silence import Reminder, Silence
from amusd.protocol.messages import Candidate, Close, Failed, Hello, Message, Open, Prepared, Progress, Shutdown
from amusd.protocol.target_session import Reception, TargetSession
from amusd.protocol.tree_target_session import TreeTargetSession
from amusd.protocol.verification import Block, PassOutcome
from amusd.runtime.handshake import told
from amusd.runtime.succession import Succession, last_line
from amusd.runtime.tally import Tally
from amusd.runtime.verifier import Session, Verifier
from amusd.sampling.rows import ProbabilityRow, unpack_rows
from amusd.sampling.stopping import Emission, StopChecker
from amusd.tracing.messages import RECEIVE, SEND, record_message
from amusd.tracing.metrics import DraftCounts, GenerationMetrics
from amusd.tracing.recorder import NO_SEQUENCE, Recorder
from amusd.tracing.runs import SEQUENCES_PER_RUN
from amusd.transport.base import Transport
from amusd.types import FinishReason

FINAL_PROGRESS_SECONDS = 0.5
"""How long a finished sequence waits for the draft's own counts."""

MAX_DRAINED = 1_000
"""Messages that are taken in between two passes at most."""

MAX_NONSENSE = 100
"""So many messages in a row that the protocol forbids, and the draft counts as lost."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence to decode."""

    prompt: tuple[int, ...]
    max_length: int
    """Prompt and answer together."""
    policy: Policy
    drafter: str | None
    """None: decode without a draft."""
    distribution: Distribution = GREEDY
    logprobs: bool = False
    max_silence_seconds: float = 0.3
    """How long the draft is waited for, all in all, while nothing is heard from it."""
    reference: tuple[int, ...] = ()
    """The answer, where it is known in advance and the drafter is to be told (a synthetic one)."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a sequence ended."""

    finish_reason: FinishReason
    metrics: GenerationMetrics
    sequence_id: int
    """Names the sequence in the events of both workers."""


@dataclass
class TargetWorker:
    """Decodes one sequence at a time with `model`, helped by the draft at the other end of `link`.

    `link` and `peer` (the draft's Hello) are None when there is no draft at all; `link` also between two drafts.
    """

    model: LanguageModel
    recorder: Recorder
    link: Transport | None = None
    peer: Hello | None = None
    draft_failure: str | None = None
    """Why no draft is used any more, once that has happened."""
    round_trip_seconds: float = 0.0
    """What the link itself takes of every answer: nobody is silent for that long."""
    succession: Succession | None = None
    """Where the next draft comes from; None: a lost one is not replaced."""
    draft_losses: list[str] = field(default_factory=list)
    """Why drafts were lost, each in one line."""
    num_draft_restarts: int = 0
    """Drafts that took the place of a lost one."""
    _next_sequence_id: int = 1
    _cache: KVCache = field(init=False)
    _max_candidates: int = 0
    """How many the block under way could have held."""
    _decision: Verify = field(default_factory=lambda: Verify(0))
    """What the policy said of it."""
    _tally: Tally = field(default_factory=Tally)
    _observer: Observer = field(default_factory=Observer)
    _verifier: Verifier = field(init=False)
    _silence: Silence = field(default_factory=Silence)
    _max_silence_seconds: float = 0.0
    _num_nonsense: int = 0
    """Messages in a row that the protocol forbids."""
    _reminder: Reminder | None = None
    """Of what the draft was told of the sequence; None as long as there is none."""
    _is_answered: bool = False
    """It has sent candidates of the sequence, so it has got the opening."""
    _has_progress: bool = False
    """The draft's counts have come since this was last set to False."""

    def __post_init__(self) -> None:
        self._cache = self.model.new_cache(self.model.max_length)
        self.model.prepare(self._cache)

    @property
    def has_draft(self) -> bool:
        """A draft is connected and has not failed."""
        return self.link is not None and self.peer is not None and self.draft_failure is None

    def decode(self, request: Request, stop: StopChecker) -> Generator[Emission, None, Outcome]:
        """Yield what each pass commits; return how it ended. Closing the generator aborts the sequence."""
        self._tally = Tally(num_prompt_tokens=len(request.prompt))
        self._observer.open(request.drafter, has_tree=bool(request.policy.fan_out))
        self._max_silence_seconds = request.max_silence_seconds + self.round_trip_seconds
        session = self._new_session(request)
        self._verifier = Verifier(self.model, request.distribution, request.prompt, logprobs=request.logprobs)
        reason = FinishReason.ABORTED
        try:
            cache = self._open(session, request)
            while True:
                block = self._next_block(session, request)
                emission = self._verify(session, cache, block, stop)
                if request.drafter is not None and not self._may_hear(session):
                    self._tally.num_tokens_alone += len(emission.token_ids)
                if emission.finish_reason is None and self._decision.tells_draft:
                    self._answer(session, request)
                yield emission
                if emission.finish_reason is not None:
                    reason = emission.finish_reason
                    break
        finally:
            self._record_sequence(session, request, reason)
            self._close(session, reason)
        return Outcome(reason, self._tally.metrics(), session.sequence_id)

    def begin_run(self, number: int) -> None:
        """What is decoded from now on belongs to this run of several, and its events to that run's file."""
        self._next_sequence_id = number * SEQUENCES_PER_RUN + 1

    def shut_down(self) -> None:
        """Tell the draft that the session is over, and close the link."""
        if self.succession is not None:
            self.succession.close()
            self.succession = None
        if self.link is not None:
            if self.has_draft:
                self._send(Shutdown())
            self.link.close()
        self.recorder.flush()

    # One sequence, from its opening to its end

    def _new_session(self, request: Request) -> Session:
        sequence_id = self._next_sequence_id
        self._next_sequence_id += 1
        if request.policy.fan_out:
            return TreeTargetSession(
                sequence_id=sequence_id,
                prompt=request.prompt,
                max_length=request.max_length,
                vocab_size=self.model.vocab_size,
                max_lookahead=request.policy.max_lookahead,
            )
        return TargetSession[ProbabilityRow](
            sequence_id=sequence_id,
            prompt=request.prompt,
            max_length=request.max_length,
            vocab_size=self.model.vocab_size,
            max_lookahead=request.policy.max_lookahead,
            wants_rows=request.distribution.rule == "rejection",
        )

    def _open(self, session: Session, request: Request) -> KVCache:
        """Send the prompt first, so that the draft prefills while the target does."""
        self._meet_next_draft(session)
        self._tell_draft(session, request)
        self._cache.truncate(0)
        start_ns = time.monotonic_ns()
        self.model.prefill(request.prompt[:-1], self._cache)
        end_ns = time.monotonic_ns()
        self._tally.prefilled(end_ns - start_ns)
        self.recorder.span("target_prefill", start_ns, end_ns, session.sequence_id)
        return self._cache

    def _tell_draft(self, session: Session, request: Request) -> None:
        """Have the draft work on the sequence, whatever is committed of it by now."""
        if request.drafter is None or not self.has_draft:
            return
        assert self.peer is not None
        session.attach(self.peer.incarnation)
        self._reminder = Reminder(time.monotonic(), self._max_silence_seconds)
        self._is_answered = False
        self._send(self._opening(session, request), session)

    def _opening(self, session: Session, request: Request) -> Open:
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

    def _answer(self, session: Session, request: Request) -> None:
        """Tell the draft what is committed by now.

        A silent one is told now and then, or a stopped one would find its link full; a verdict is cumulative. One that
        never sent candidates of the sequence may not have got its opening; if it has, it ignores the second one.
        """
        if not session.attached or self._reminder is None:
            return
        is_reminder = self._reminder.is_due(time.monotonic())
        if is_reminder and not self._is_answered and not self._send(self._opening(session, request), session):
            return
        if is_reminder or self._may_hear(session):
            self._send(session.verdict(), session)

    def _next_block(self, session: Session, request: Request) -> Block:
        """Drain what has arrived and let the policy decide, until it decides to verify."""
        policy = request.policy
        ready_ns = time.monotonic_ns()
        if self._meet_next_draft(session):
            self._tell_draft(session, request)
        while True:
            self._drain(session)
            limit = min(session.remaining, self.model.max_rows(session.committed_length - 1)) - 1
            waited_ns = time.monotonic_ns() - ready_ns
            view = self._observer.view(session, max_candidates=limit, waited_ns=waited_ns)
            if view.may_get_more and not self._may_hear(session):
                view = replace(view, may_get_more=False)
            decision = policy.decide(view)
            if not isinstance(decision, Wait):
                self._decision = decision
                self._max_candidates = min(limit, policy.max_lookahead)
                num_candidates = min(decision.num_candidates, limit)
                return self._verifier.begin(session, num_candidates, policy.breadth, decision.min_chance)
            seconds = min(decision.seconds, self._silence.seconds_left(self._max_silence_seconds))
            self._wait(session, seconds, because(decision))

    def _verify(self, session: Session, cache: KVCache, block: Block, stop: StopChecker) -> Emission:
        """One forward over [last committed token, candidates]; accept, commit, cut the cache back."""
        start_ns = time.monotonic_ns()
        acceptance, end_ns = self._verifier.judge(session, block, cache, lambda: self._drain(session))
        emission = stop.push(acceptance.token_ids)
        if self._verifier.logprobs:
            emission = replace(emission, logprobs=self._verifier.logprobs[: len(emission.token_ids)])
        num_accepted = min(acceptance.num_accepted, len(emission.token_ids))
        outcome = session.commit(emission.token_ids, num_accepted, ends=emission.finish_reason is not None)
        # The last committed token is the next pass's first input: it stays outside the cache.
        cache.truncate(min(cache.length, session.committed_length - 1))
        self._pass_done(session, start_ns, end_ns, outcome)
        return emission

    def _pass_done(self, session: Session, start_ns: int, end_ns: int, outcome: PassOutcome) -> None:
        if outcome.num_judged and self.succession is not None:
            self.succession.verified()
        rests = not self._decision.tells_draft
        self._observer.passed(start_ns, end_ns, outcome, foreseen=not session.draft_restarting, rests=rests)
        self._tally.passed(end_ns - start_ns, outcome)
        self.recorder.span(
            "target_pass",
            start_ns,
            end_ns,
            session.sequence_id,
            max_candidates=self._max_candidates,
            committed_length=session.committed_length,
            **asdict(outcome),
            **because(self._decision),
        )

    def _record_sequence(self, session: Session, request: Request, reason: FinishReason) -> None:
        self.recorder.span(
            "sequence",
            self._tally.start_ns,
            self._tally.last_ns,
            session.sequence_id,
            policy=type(request.policy).__name__,
            max_lookahead=request.policy.max_lookahead,
            drafter=request.drafter,
            num_prompt_tokens=len(request.prompt),
            finish_reason=reason.value,
        )

    def _close(self, session: Session, reason: FinishReason) -> None:
        if session.attached and self._send(Close(session.sequence_id, reason), session):
            self._await_final_progress(session)
        session.detach()
        self.recorder.flush()

    def _await_final_progress(self, session: Session) -> None:
        patience = min(FINAL_PROGRESS_SECONDS, self._silence.seconds_left(self._max_silence_seconds))
        deadline = time.monotonic() + patience
        self._has_progress = False
        while not self._has_progress and self.has_draft and (left := deadline - time.monotonic()) > 0:
            self._take(session, left)

    # The draft: whether it is there, and what it says

    def _may_hear(self, session: Session) -> bool:
        """A draft works on the sequence, and is not silent."""
        return session.attached and self._silence.seconds_left(self._max_silence_seconds) > 0

    def _meet_next_draft(self, session: Session) -> bool:
        """Look for one in the place of a lost one, without waiting; whether it has come."""
        if self.succession is None or self.link is not None:
            return False
        found = self.succession.poll()
        self.draft_failure = self.succession.failure
        if found is None:
            return False
        self.link, self.peer = found
        self._silence.heard()
        self._num_nonsense = 0
        self.num_draft_restarts += 1
        self._tally.num_draft_restarts += 1
        self.recorder.instant("draft_back", session.sequence_id, incarnation=self.peer.incarnation)
        return True

    def _drain(self, session: Session) -> None:
        if session.attached and not self.has_draft:
            session.detach()
        for _ in range(MAX_DRAINED):  # a flood must not keep the target from its pass
            if not (session.attached and self._take(session, 0.0)):
                break

    def _wait(self, session: Session, seconds: float, reason: dict[str, str]) -> None:
        start_ns = time.monotonic_ns()
        num_candidates = session.num_candidates
        self._take(session, seconds)
        end_ns = time.monotonic_ns()
        self._tally.waited(end_ns - start_ns)
        self._observer.waited(end_ns - start_ns, num_before=num_candidates, num_after=session.num_candidates)
        self.recorder.span("target_wait", start_ns, end_ns, session.sequence_id, **reason)

    def _take(self, session: Session, timeout: float) -> bool:
        """Receive and handle one message; False when none came."""
        if not self.has_draft:
            return False
        assert self.link is not None
        start = time.monotonic()
        try:
            message = self.link.receive(timeout)
        except PeerLostError as error:
            self._lose_draft(session, str(error))
            return False
        if timeout > 0:
            self._silence.waited(time.monotonic() - start)
        if message is not None:
            self._handle(session, message)
        return message is not None

    def _handle(self, session: Session, message: Message) -> None:
        if isinstance(message, Candidate | Prepared):
            reception = self._receive_candidate(session, message)
            record_message(self.recorder, RECEIVE, message, reception=reception)
            self._note_answer(session, message)
            self._judge_sense(session, makes_sense=reception not in ("refused", Reception.FOREIGN.value))
            return
        record_message(self.recorder, RECEIVE, message)
        if isinstance(message, Failed):
            self._lose_draft(session, told(message))
            return
        self._judge_sense(session, makes_sense=isinstance(message, Progress))
        if isinstance(message, Progress) and message.sequence_id == session.sequence_id:
            self._has_progress = True
            self._tally.draft = DraftCounts(
                num_steps=message.num_steps,
                num_drafted=message.num_drafted,
                num_rollbacks=message.num_rollbacks,
                num_stale=message.num_stale,
                busy_ns=message.busy_ns,
                wait_ns=message.wait_ns,
                open_ns=message.open_ns,
            )

    def _note_answer(self, session: Session, message: Candidate | Prepared) -> None:
        addressed = self.peer is not None and message.incarnation == self.peer.incarnation
        if addressed and message.sequence_id == session.sequence_id and self._reminder is not None:
            self._is_answered = True
            self._reminder.heard(time.monotonic())

    def _judge_sense(self, session: Session, *, makes_sense: bool) -> None:
        """A draft that talks nonsense is not heard, and in the end not listened to."""
        if makes_sense:
            self._silence.heard()
            self._num_nonsense = 0
            return
        self._num_nonsense += 1
        if self._num_nonsense >= MAX_NONSENSE:
            self._lose_draft(session, f"it sent {MAX_NONSENSE} messages in a row that the protocol forbids")

    def _rows(self, candidate: Candidate) -> tuple[ProbabilityRow, ...]:
        """What its tokens were drawn from. Raises `PeerProtocolError` for what no draft could have drawn from."""
        if not candidate.draft_probs:
            return ()
        try:
            return unpack_rows(candidate.draft_probs, candidate.token_ids, self.model.vocab_size)
        except ValueError as error:
            raise PeerProtocolError(f"candidate: {error}") from error

    def _receive_candidate(self, session: Session, message: Candidate | Prepared) -> str:
        """Take it in; return what became of it, for the record."""
        try:
            if isinstance(session, TreeTargetSession):
                reception = session.receive(message) if isinstance(message, Prepared) else Reception.STALE
            elif isinstance(message, Candidate):
                reception = session.receive(message, self._rows(message))
            else:
                reception = Reception.STALE
        except PeerProtocolError:
            self._tally.num_refused += 1
            return "refused"
        if reception is Reception.FOREIGN:
            self._tally.num_refused += 1
        elif reception is not Reception.TAKEN:
            self._tally.num_stale_candidates += 1
        return reception.value

    def _send(self, message: Message, session: Session | None = None) -> bool:
        """Send, or note that the draft is gone; False then. `session`: the sequence that it was working on."""
        assert self.link is not None
        record_message(self.recorder, SEND, message)
        try:
            self.link.send(message)
        except PeerLostError as error:
            self._lose_draft(session, str(error))
            return False
        return True

    def _lose_draft(self, session: Session | None, reason: str) -> None:
        """Go on without it, and look for the next one if that can be."""
        if session is not None:
            session.detach()
        self.recorder.instant("draft_lost", NO_SEQUENCE if session is None else session.sequence_id, reason=reason)
        self._tally.num_draft_losses += 1
        self.draft_losses.append(last_line(reason))
        if self.succession is None:
            self.draft_failure = reason
            return
        self.succession.lost(reason)
        assert self.link is not None
        self.link.close()
        self.link = None
        self.draft_failure = self.succession.failure
