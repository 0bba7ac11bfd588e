"""One request at the target.

cache             keys and values of [0, committed_length - 1): the last committed token is the next input
session           the committed tokens, and the candidates behind them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

from amusd.errors import ConfigError, PeerProtocolError
from amusd.models.kv_cache import KVCache
from amusd.models.passes import ModelOutput, Rows
from amusd.policies.base import Decision, TargetView, Verify, Wait
from amusd.policies.observer import Observer
from amusd.protocol.candidate_tree import Reception
from amusd.protocol.messages import Candidate, Open, Progress
from amusd.protocol.target_session import TargetSession
from amusd.protocol.verification import Block, PassOutcome
from amusd.runner.model_runner import ModelRunner
from amusd.runtime.drafted_sequence import DraftedSequence
from amusd.runtime.verifier import Request, Verifier
from amusd.sampling.acceptance import Acceptance, unpack_draft_probs
from amusd.sampling.stopping import StopChecker
from amusd.tracing.metrics import GenerationMetrics
from amusd.types import FinishReason, Token


@dataclass(eq=False)
class TargetSequence(DraftedSequence):
    """The state of one request while the target decodes it."""

    request: Request
    stop: StopChecker
    model: ModelRunner
    cache: KVCache
    observer: Observer
    sequence_id: int
    """Names it in messages and events."""
    start_ns: int
    session: TargetSession = field(init=False)
    wish: Open | None = field(init=False)
    max_silence_seconds: float = field(init=False)
    verifier: Verifier = field(init=False)
    metrics: GenerationMetrics = field(init=False)
    decision: Verify = field(default_factory=lambda: Verify(0))
    """For the pass under way, or the next one if it begins now."""
    view: TargetView = field(init=False)
    """What it was decided on by."""
    block: Block = field(init=False)
    """What the pass under way verifies, or the last one did."""
    tokens: list[Token] = field(default_factory=list)
    """The answer so far; it only grows."""
    finish_reason: FinishReason | None = None
    """None while the answer goes on."""
    error: ConfigError | None = None
    _room: int = 0

    def __post_init__(self) -> None:
        request, policy, fan_out = self.request, self.request.policy, self.request.policy.fan_out
        self.session = TargetSession(
            sequence_id=self.sequence_id,
            prompt=request.prompt,
            max_length=request.max_length,
            vocab_size=self.model.vocab_size,
            fan_out=fan_out,
            wants_draft_probs=request.distribution.rule == "rejection",
        )
        self.max_silence_seconds, self.wish = request.max_silence_seconds, None
        if request.drafter is not None:
            self.wish = Open(
                sequence_id=self.sequence_id,
                incarnation=0,
                token_ids=(),
                max_length=request.max_length,
                drafter=request.drafter,
                max_lookahead=policy.max_lookahead,
                tokens_per_message=policy.tokens_per_message,
                reference=request.reference,
                sampling=request.distribution.as_message(),
                fan_out=fan_out,
                rows_per_step=policy.rows_per_step,
                max_steps=policy.max_steps,
            )
        self.verifier = Verifier(self.model, request, self.cache)
        self.metrics = GenerationMetrics(num_prompt_tokens=len(request.prompt))
        self.observer.open(request.drafter, has_tree=fan_out > 1)

    @property
    def ended_by(self) -> FinishReason:
        """Why it ended; aborted unless a token ended it."""
        return self.finish_reason or "aborted"

    @property
    def is_prefilled(self) -> bool:
        """The cache holds the prompt."""
        return self.cache.length >= len(self.request.prompt) - 1

    @property
    def kept(self) -> Sequence[int]:
        """The tokens whose keys and values may serve another sequence.

        With `fixed` the prompt alone: rows of the answer come from passes that verify, and have other bits.
        """
        known = self.request.prompt if self.model.numerics.fixed else self.session.committed
        return known[:-1][: self.cache.length]

    def num_held_features(self, incarnation: int) -> int:
        """Those of the sequence that this one follows.

        The last position does not count: drafters wait for its features.
        """
        followed = self.followed(incarnation)
        if followed is None or followed.at_draft is None:
            return 0
        shared = min(self.metrics.num_cached_tokens, self.session.committed_length - 2)
        return max(0, min(followed.at_draft.num_features, shared))

    def receive(self, message: Candidate) -> Reception:
        """Take in the draft's candidates. Raises `PeerProtocolError` for what no correct draft sends."""
        draft_probs: Sequence[Any] = ()
        try:
            if message.draft_probs:
                draft_probs = unpack_draft_probs(message.draft_probs, message.token_ids, self.model.vocab_size)
            reception = self.session.receive(message, draft_probs)
        except (PeerProtocolError, ValueError) as error:
            self.metrics.num_refused += 1
            raise PeerProtocolError(str(error)) from error
        self.metrics.num_stale_candidates += reception != "taken"
        self.observer.heard(message.step_ns)
        return reception

    def receive_counts(self, counts: Progress) -> None:
        """See `DraftedSequence`."""
        self.metrics.reported(counts)

    def lose_draft(self) -> None:
        """See `DraftedSequence`."""
        super().lose_draft()
        self.metrics.lost_draft()

    def find_draft(self) -> None:
        """See `DraftedSequence`."""
        self.metrics.num_draft_restarts += self.has_lost_draft
        super().find_draft()
        if self.is_prefilled:
            self.observer.draft_joined()

    def decide(self, waited_ns: int, *, may_hear: bool) -> Decision:
        """Ask the policy about the next pass, which could have begun `waited_ns` ago.

        `may_hear`: a draft works on the sequence. Without one nothing is waited for, and the draft is told of each
        pass, to be heard again.
        """
        max_rows = self.model.numerics.max_rows(self.session.committed_length - 1)
        self._room = min(self.session.remaining, max_rows) - 1
        view = self.observer.view(self.session, max_candidates=self._room, waited_ns=waited_ns)
        if not may_hear:
            view = replace(view, may_get_more=False, drafting_pays=True)
        self.view = view
        try:
            decision = self.request.policy.decide(view)
        except ConfigError as error:  # by a policy of the user's own; the other sequences go on
            self.error, decision = error, Verify(0)
        if isinstance(decision, Wait) and not (may_hear and decision.seconds > 0):  # by a policy of the user's own
            decision = Verify(view.num_candidates)
        self.decision = decision if isinstance(decision, Verify) else Verify(view.num_candidates)
        return decision

    def begin(self) -> Rows:
        """The rows of the pass that begins now."""
        num_candidates = min(self.decision.num_candidates, self._room)
        breadth, min_chance = self.request.policy.breadth, self.decision.min_chance
        self.block = self.verifier.begin(self.session, num_candidates, breadth, min_chance)
        return self.verifier.rows(self.block)

    def commit(self, output: ModelOutput) -> PassOutcome:
        """Judge the candidates of the pass; make final what is accepted, and the target's own token behind it.

        The answer may end before that. Raises `NotFiniteError`, after which nothing more is final.
        """
        return self._finish(self.verifier.judge(self.session, self.block, output))

    def commit_again(self) -> PassOutcome:
        """Make the pass again, without candidates, and commit its token. Raises `NotFiniteError` as `commit`."""
        return self._finish(self.verifier.judge_again(self.session, self.block))

    def _finish(self, acceptance: Acceptance) -> PassOutcome:
        """Make accepted tokens final, up to the answer's end, and cut the cache back to them."""
        texts, self.finish_reason = self.stop.push(acceptance.token_ids)
        token_ids = acceptance.token_ids[: len(texts)]
        num_accepted = min(acceptance.num_accepted, len(texts))
        sources = self.block.sources_along(token_ids, num_accepted)
        scores = self.verifier.scores or repeat((None, ()))
        for token_id, text, score, source in zip(token_ids, texts, scores, sources, strict=False):
            self.tokens.append(Token(token_id, text, *score, source))
        outcome = self.session.commit(token_ids, num_accepted, ends=self.finish_reason is not None)
        self.cache.truncate(min(self.cache.length, self.session.committed_length - 1))
        return outcome

    def summary(self) -> dict[str, Any]:
        """Fields of its event `sequence`."""
        request = self.request
        return {
            "policy": request.policy.name,
            "max_lookahead": request.policy.max_lookahead,
            "drafter": request.drafter,
            "num_prompt_tokens": len(request.prompt),
            "finish_reason": self.ended_by,
        }
