"""The target's loop: drain, decide, verify, commit, answer.

It never waits for an acknowledgement, and it can always go on alone: what it hears from a draft comes over its
`DraftLine`. The three modes are this loop under three policies (`amusd/policies`).
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import asdict, dataclass, field, replace

from amusd.models.language_model import KVCache, LanguageModel
from amusd.policies.base import Verify, Wait, because
from amusd.policies.observer import Observer
from amusd.protocol.target_session import TargetSession
from amusd.protocol.verification import Block, PassOutcome
from amusd.runtime.draft_line import DraftLine
from amusd.runtime.request import Request
from amusd.runtime.verifier import Verifier, prepare_to_verify
from amusd.sampling.digest import Digests
from amusd.sampling.stopping import Emission, StopChecker
from amusd.tracing.metrics import GenerationMetrics
from amusd.tracing.recorder import SEQUENCES_PER_RUN, Recorder
from amusd.tracing.tally import Tally
from amusd.types import FinishReason


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a sequence ended."""

    finish_reason: FinishReason
    metrics: GenerationMetrics
    sequence_id: int
    """Names the sequence in the events of both workers."""


@dataclass
class TargetWorker:
    """Decodes one sequence at a time with `model`, helped by the draft at the other end of `line`, if there is one."""

    model: LanguageModel
    recorder: Recorder
    line: DraftLine
    _next_sequence_id: int = 1
    _cache: KVCache = field(init=False)
    _digests: Digests | None = field(init=False)
    _max_candidates: int = 0
    """How many the block under way could have held."""
    _decision: Verify = field(default_factory=lambda: Verify(0))
    """What the policy said of it."""
    _tally: Tally = field(init=False)
    _observer: Observer = field(default_factory=Observer)
    _verifier: Verifier = field(init=False)

    def __post_init__(self) -> None:
        self._cache = self.model.new_cache(self.model.max_length)
        self._digests = prepare_to_verify(self.model, self._cache)

    def decode(self, request: Request, stop: StopChecker) -> Generator[Emission, None, Outcome]:
        """Yield what each pass commits; return how it ended. Closing the generator aborts the sequence."""
        self._tally = Tally(time.monotonic_ns(), len(request.prompt))
        self._observer.open(request.drafter, has_tree=request.policy.fan_out > 1)
        session = self._new_session(request)
        self._verifier = Verifier(
            self.model, request.distribution, request.prompt, logprobs=request.logprobs, digests=self._digests
        )
        reason = FinishReason.ABORTED
        try:
            self.line.begin(session, request, self._tally)  # first, so that the draft prefills while the target does
            cache = self._prefill(session, request)
            while True:
                block = self._next_block(session, request)
                emission = self._verify(session, cache, block, stop)
                if request.drafter is not None and not self.line.may_hear:
                    self._tally.num_tokens_alone += len(emission.token_ids)
                if emission.finish_reason is None and self._decision.tells_draft:
                    self.line.answer()
                yield emission
                if emission.finish_reason is not None:
                    reason = emission.finish_reason
                    break
        finally:
            self._record_sequence(session, request, reason)
            self.line.end(reason)
            self.recorder.flush()
        return Outcome(reason, self._tally.metrics(), session.sequence_id)

    def begin_run(self, number: int) -> None:
        """What is decoded from now on belongs to this run of several, and its events to that run's file."""
        self._next_sequence_id = number * SEQUENCES_PER_RUN + 1

    def shut_down(self) -> None:
        """Tell the draft that all is over."""
        self.line.shut_down()
        self.recorder.flush()

    # One sequence, from its opening to its end

    def _new_session(self, request: Request) -> TargetSession:
        sequence_id = self._next_sequence_id
        self._next_sequence_id += 1
        return TargetSession(
            sequence_id=sequence_id,
            prompt=request.prompt,
            max_length=request.max_length,
            vocab_size=self.model.vocab_size,
            fan_out=request.policy.fan_out,
            wants_rows=request.distribution.rule == "rejection",
        )

    def _prefill(self, session: TargetSession, request: Request) -> KVCache:
        self._cache.truncate(0)
        start_ns = time.monotonic_ns()
        self.model.prefill(request.prompt[:-1], self._cache)
        end_ns = time.monotonic_ns()
        self._tally.prefill_ns += end_ns - start_ns
        self.recorder.span("target_prefill", start_ns, end_ns, session.sequence_id)
        return self._cache

    def _next_block(self, session: TargetSession, request: Request) -> Block:
        """Drain what has arrived and let the policy decide, until it decides to verify."""
        policy = request.policy
        ready_ns = time.monotonic_ns()
        if self.line.look_for_next():
            self._observer.draft_joined()
        while True:
            self.line.drain()
            limit = min(session.remaining, self.model.max_rows(session.committed_length - 1)) - 1
            waited_ns = time.monotonic_ns() - ready_ns
            view = self._observer.view(session, max_candidates=limit, waited_ns=waited_ns)
            if not self.line.may_hear:  # whether drafting pays is no question then; it must be told, to be heard again
                view = replace(view, may_get_more=False, drafting_pays=True)
            decision = policy.decide(view)
            if not isinstance(decision, Wait):
                self._decision = decision
                self._max_candidates = min(limit, policy.max_lookahead)
                num_candidates = min(decision.num_candidates, limit)
                return self._verifier.begin(session, num_candidates, policy.breadth, decision.min_chance)
            self._wait(session, min(decision.seconds, self.line.patience_seconds), because(decision))

    def _verify(self, session: TargetSession, cache: KVCache, block: Block, stop: StopChecker) -> Emission:
        """One forward over [last committed token, candidates]; accept, commit, cut the cache back."""
        start_ns = time.monotonic_ns()
        acceptance, end_ns = self._verifier.judge(session, block, cache, self.line.drain)
        emission = stop.push(acceptance.token_ids)
        if self._verifier.logprobs:
            emission = replace(emission, logprobs=self._verifier.logprobs[: len(emission.token_ids)])
        num_accepted = min(acceptance.num_accepted, len(emission.token_ids))
        outcome = session.commit(emission.token_ids, num_accepted, ends=emission.finish_reason is not None)
        # The last committed token is the next pass's first input: it stays outside the cache.
        cache.truncate(min(cache.length, session.committed_length - 1))
        self._pass_done(session, start_ns, end_ns, outcome)
        return emission

    def _pass_done(self, session: TargetSession, start_ns: int, end_ns: int, outcome: PassOutcome) -> None:
        if outcome.num_judged:
            self.line.verified()
        rests = not self._decision.tells_draft
        self._observer.passed(
            start_ns,
            end_ns,
            outcome,
            foreseen=not session.draft_restarting,
            rests=rests,
            is_alone=not self.line.may_hear,
        )
        self._tally.passed(time.monotonic_ns(), end_ns - start_ns, outcome)
        self.recorder.span(
            "target_pass",
            start_ns,
            end_ns,
            session.sequence_id,
            max_candidates=self._max_candidates,
            committed_length=session.committed_length,
            num_ready=session.num_candidates,
            **asdict(outcome),
            **because(self._decision),
        )

    def _record_sequence(self, session: TargetSession, request: Request, reason: FinishReason) -> None:
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
        if self._verifier.num_whole_rows:
            self.recorder.instant("whole_rows", session.sequence_id, number=self._verifier.num_whole_rows)

    def _wait(self, session: TargetSession, seconds: float, reason: dict[str, str]) -> None:
        start_ns = time.monotonic_ns()
        num_candidates = session.num_candidates
        self.line.take(seconds)
        end_ns = time.monotonic_ns()
        self._tally.wait_ns += end_ns - start_ns
        self._observer.waited(end_ns - start_ns, num_before=num_candidates, num_after=session.num_candidates)
        self.recorder.span("target_wait", start_ns, end_ns, session.sequence_id, **reason)
