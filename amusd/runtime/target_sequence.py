"""One request at the target.

cache             keys and values of [0, committed_length - 1): the last committed token is the next input
session           the committed tokens, and the candidates after them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

from amusd.errors import ConfigError, PeerProtocolError
from amusd.models.kv_cache import KVCache
from amusd.models.passes import ModelOutput, Rows
from amusd.policies.base import Decision, TargetView, Verify, Wait
from amusd.policies.observer import Observer
from amusd.protocol.candidate_tree import Reception
from amusd.protocol.messages import Candidate, Open, Progress
from amusd.protocol.verification import Block, PassOutcome
from amusd.runner.model_runner import ModelRunner
from amusd.runtime.client_sequence import ClientSequence
from amusd.runtime.verifier import Request, Verifier
from amusd.sampling.acceptance import Acceptance, unpack_draft_probs
from amusd.sampling.stopping import StopChecker
from amusd.tracing.metrics import GenerationMetrics
from amusd.types import FinishReason, Token


class TargetSequence(ClientSequence):
    """The state of one request while the target decodes it."""

    view: TargetView
    """The policy's last view."""
    decision: Verify
    """Decision for the present pass, or for the next if begun now."""
    block: Block
    """The candidates of the pass under way, or of the last one."""
    finish_reason: FinishReason | None = None
    """None while the answer goes on."""
    error: ConfigError | None = None
    """Why the answer cannot go on."""

    def __init__(
        self,
        request: Request,
        stop: StopChecker,
        model: ModelRunner,
        cache: KVCache,
        observer: Observer,
        *,
        sequence_id: int,
        start_ns: int,
    ) -> None:
        policy = request.policy
        wish = Open(
            sequence_id=sequence_id,
            incarnation=0,
            token_ids=(),
            max_length=request.max_length,
            drafter=request.drafter or "",
            max_lookahead=policy.max_lookahead,
            tokens_per_message=policy.tokens_per_message,
            reference=request.reference,
            sampling=request.distribution.as_message(),
            fan_out=policy.fan_out,
            rows_per_step=policy.rows_per_step,
            max_steps=policy.max_steps,
        )
        has_probs, silence = request.distribution.rule == "rejection", request.max_silence_seconds
        super().__init__(request.prompt, wish, model.vocab_size, silence, wants_draft_probs=has_probs)
        self.request, self.stop, self.model, self.cache, self.observer = request, stop, model, cache, observer
        self.start_ns = start_ns
        self.verifier = Verifier(model, request, cache)
        self.metrics = GenerationMetrics(num_prompt_tokens=len(request.prompt))
        self.tokens: list[Token] = []
        """The answer so far; it only grows."""
        observer.open(request.drafter, has_tree=policy.fan_out > 1)

    @property
    def ended_by(self) -> FinishReason:
        """Why the answer ended; aborted unless a token ended it."""
        return self.finish_reason or "aborted"

    @property
    def is_prefilled(self) -> bool:
        """Whether the cache holds the prompt except its last token."""
        return self.cache.length >= len(self.request.prompt) - 1

    @property
    def kept(self) -> Sequence[int]:
        """The tokens whose keys and values may serve another sequence.

        With `fixed` the prompt alone: the answer's rows come from verifying passes and have other bits.
        """
        known = self.request.prompt if self.model.numerics.fixed else self.session.committed
        return known[:-1][: self.cache.length]

    def num_held_features(self, incarnation: int) -> int:
        """Number of leading positions whose features the draft keeps from the sequence before this one.

        The last position does not count, since drafters wait for its features.
        """
        followed = self.followed(incarnation)
        if followed is None or followed.at_draft is None:
            return 0
        shared = min(self.metrics.num_cached_tokens, self.session.committed_length - 2)
        return max(0, min(followed.at_draft.num_features, shared))

    def receive(self, message: Candidate) -> Reception:
        """See `ClientSequence`."""
        draft_probs: Sequence[Any] = ()
        try:
            if message.draft_probs:
                draft_probs = unpack_draft_probs(message.draft_probs, message.token_ids, self.model.vocab_size)
            reception = self.session.receive(message, draft_probs)
        except (PeerProtocolError, ValueError) as error:
            self.metrics.num_refused += 1
            raise PeerProtocolError(str(error)) from error
        self.metrics.num_stale_candidates += reception != "taken"
        self.observer.on_step(message.step_ns)
        return reception

    def receive_counts(self, counts: Progress) -> None:
        """See `ClientSequence`."""
        self.metrics.on_progress(counts)

    def lose_draft(self) -> None:
        """See `ClientSequence`."""
        super().lose_draft()
        self.metrics.on_draft_lost()

    def find_draft(self) -> None:
        """See `ClientSequence`."""
        self.metrics.num_draft_restarts += self.has_lost_draft
        super().find_draft()
        if self.is_prefilled:
            self.observer.on_draft_joined()

    def decide(self, waited_ns: int, *, has_draft: bool) -> Decision:
        """Ask the policy about the next pass, which could have begun `waited_ns` ago.

        `has_draft`: a draft that is not silent works on the sequence. Without a draft the target never waits, and sends
        every verdict, so that a draft can join again.
        """
        max_rows = self.model.numerics.max_rows(self.session.committed_length - 1)
        most = min(self.session.remaining, max_rows) - 1
        view = self.observer.view(self.session, max_candidates=most, waited_ns=waited_ns)
        if not has_draft:
            view = replace(view, may_get_more=False, drafting_pays=True)
        self.view = view
        try:
            decision = self.request.policy.decide(view)
        except ConfigError as error:  # by a policy of the user's own; the other sequences go on
            self.error, decision = error, Verify(0)
        if isinstance(decision, Wait) and not (has_draft and decision.seconds > 0):  # by a policy of the user's own
            decision = Verify(view.num_candidates)
        self.decision = decision if isinstance(decision, Verify) else Verify(view.num_candidates)
        return decision

    def begin(self) -> Rows:
        """The rows of the pass that begins now."""
        num_candidates = min(self.decision.num_candidates, self.view.max_candidates)
        breadth, min_chance = self.request.policy.breadth, self.decision.min_chance
        self.block = self.verifier.begin(self.session, num_candidates, breadth, min_chance)
        return self.verifier.rows(self.block)

    def commit(self, output: ModelOutput) -> PassOutcome:
        """Judge the pass's candidates; commit the accepted ones and the target's own token after them.

        The answer may end before that token. Raises `NotFiniteError`, and then commits nothing.
        """
        return self._finish(self.verifier.judge(self.session, self.block, output))

    def commit_again(self) -> PassOutcome:
        """Repeat the pass without candidates, and commit its token. Raises `NotFiniteError` as `commit`."""
        return self._finish(self.verifier.judge_again(self.session, self.block))

    def _finish(self, acceptance: Acceptance) -> PassOutcome:
        """Commit accepted tokens up to the answer's end, and truncate the cache."""
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
        """Fields of the event `sequence`."""
        request = self.request
        return {
            "policy": request.policy.name,
            "max_lookahead": request.policy.max_lookahead,
            "drafter": request.drafter,
            "num_prompt_tokens": len(request.prompt),
            "finish_reason": self.ended_by,
        }
