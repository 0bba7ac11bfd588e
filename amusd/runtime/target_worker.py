"""The target's loop: drain, decide, verify, commit, answer.

It never waits for an acknowledgement, and it can always go on alone: what it hears from a draft comes through its
`DraftClient`. The three modes are this loop under three policies (`amusd/policies`).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import asdict, dataclass, field

from amusd.models.language_model import KVCache, LanguageModel
from amusd.policies.base import Wait, because
from amusd.policies.observer import Observer
from amusd.protocol.target_session import TargetSession
from amusd.protocol.verification import Block
from amusd.runtime.draft_client import DraftClient
from amusd.runtime.target_sequence import Outcome, Request, TargetSequence
from amusd.runtime.verifier import Verifier, prepare_to_verify
from amusd.sampling.digest import Digests
from amusd.sampling.stopping import Emission, StopChecker
from amusd.tracing.recorder import SEQUENCES_PER_RUN, Recorder
from amusd.tracing.tally import Tally


@dataclass
class TargetWorker:
    """Decodes one sequence at a time with `model`, helped by the draft that `client` reaches, if there is one."""

    model: LanguageModel
    recorder: Recorder
    client: DraftClient
    _next_sequence_id: int = 1
    _observer: Observer = field(default_factory=Observer)
    _cache: KVCache = field(init=False)
    _digests: Digests | None = field(init=False)

    def __post_init__(self) -> None:
        self._cache = self.model.new_cache(self.model.max_length)
        self._digests = prepare_to_verify(self.model, self._cache)

    def decode(self, request: Request, stop: StopChecker) -> Generator[Emission, None, Outcome]:
        """Yield what each pass commits; return how it ended. Closing the generator aborts the sequence."""
        sequence = self._admit(request, stop)
        try:
            self.client.open(sequence)  # first, so that the draft prefills while the target does
            self._prefill(sequence)
            while sequence.finish_reason is None:
                block = self._next_block(sequence)
                emission = self._verify(sequence, block)
                if sequence.tells_draft:
                    self.client.answer(sequence)
                yield emission
        finally:
            self._end(sequence)
        return sequence.outcome()

    def begin_run(self, number: int) -> None:
        """What is decoded from now on belongs to this run of several, and its events to that run's file."""
        self._next_sequence_id = number * SEQUENCES_PER_RUN + 1

    def shut_down(self) -> None:
        """Tell the draft that all is over."""
        self.client.shut_down()
        self.recorder.flush()

    # The steps, in their order

    def _admit(self, request: Request, stop: StopChecker) -> TargetSequence:
        session = TargetSession(
            sequence_id=self._next_sequence_id,
            prompt=request.prompt,
            max_length=request.max_length,
            vocab_size=self.model.vocab_size,
            fan_out=request.policy.fan_out,
            wants_rows=request.distribution.rule == "rejection",
        )
        verifier = Verifier(
            self.model, request.distribution, request.prompt, logprobs=request.logprobs, digests=self._digests
        )
        self._next_sequence_id += 1
        self._cache.truncate(0)
        self._observer.open(request.drafter, has_tree=request.policy.fan_out > 1)
        tally = Tally(self.recorder.now_ns(), len(request.prompt))
        return TargetSequence(request, stop, session, self._cache, verifier, self._observer, tally)

    def _prefill(self, sequence: TargetSequence) -> None:
        start_ns = self.recorder.now_ns()
        self.model.prefill(sequence.request.prompt[:-1], sequence.cache)
        end_ns = self.recorder.now_ns()
        sequence.tally.prefill_ns += end_ns - start_ns
        self.recorder.span("target_prefill", start_ns, end_ns, sequence.sequence_id)

    def _next_block(self, sequence: TargetSequence) -> Block:
        """Drain what has arrived and let the policy decide, until it decides to verify."""
        client, session = self.client, sequence.session
        ready_ns = self.recorder.now_ns()
        if client.look_for_next():
            sequence.observer.draft_joined()
        while True:
            client.drain()
            max_candidates = min(session.remaining, self.model.max_rows(session.committed_length - 1)) - 1
            waited_ns = self.recorder.now_ns() - ready_ns
            decision = sequence.decide(max_candidates, waited_ns, may_hear=client.may_hear(sequence))
            if not isinstance(decision, Wait):
                return sequence.begin(decision, max_candidates)
            self._wait(sequence, decision)

    def _wait(self, sequence: TargetSequence, decision: Wait) -> None:
        """Wait for one message, no longer than the policy says, nor than a silent draft is waited for."""
        start_ns, num_before = self.recorder.now_ns(), sequence.session.num_candidates
        self.client.take(min(decision.seconds, self.client.patience_seconds))
        end_ns = self.recorder.now_ns()
        sequence.waited(end_ns - start_ns, num_before=num_before)
        self.recorder.span("target_wait", start_ns, end_ns, sequence.sequence_id, **because(decision))

    def _verify(self, sequence: TargetSequence, block: Block) -> Emission:
        """One forward over [last committed token, candidates]; accept, commit, cut the cache back."""
        start_ns = self.recorder.now_ns()
        acceptance, end_ns = sequence.verifier.judge(sequence.session, block, sequence.cache, self.client.drain)
        emission, outcome = sequence.commit(acceptance)
        if outcome.num_judged:
            self.client.verified()
        sequence.observe(start_ns, end_ns, self.recorder.now_ns(), outcome, may_hear=self.client.may_hear(sequence))
        self.recorder.span(
            "target_pass",
            start_ns,
            end_ns,
            sequence.sequence_id,
            max_candidates=sequence.max_candidates,
            committed_length=sequence.session.committed_length,
            num_ready=sequence.session.num_candidates,
            **asdict(outcome),
            **because(sequence.decision),
        )
        return emission

    def _end(self, sequence: TargetSequence) -> None:
        tally, sequence_id = sequence.tally, sequence.sequence_id
        self.recorder.span("sequence", tally.start_ns, tally.last_ns, sequence_id, **sequence.summary())
        if sequence.verifier.num_whole_rows:
            self.recorder.instant("whole_rows", sequence_id, number=sequence.verifier.num_whole_rows)
        self.client.close(sequence, sequence.ended_by)
        self.recorder.flush()
