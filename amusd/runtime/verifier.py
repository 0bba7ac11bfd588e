"""One target pass: the rows to compute, and the tokens to commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from amusd.config import GREEDY, Distribution
from amusd.errors import NotFiniteError
from amusd.models.kv_cache import KVCache
from amusd.models.passes import ModelOutput, Rows, SamplerRows
from amusd.policies.base import Policy
from amusd.protocol.target_session import TargetSession
from amusd.protocol.verification import Block
from amusd.runner.model_runner import ModelRunner
from amusd.sampling.acceptance import Acceptance, RatioTest, accept_along
from amusd.sampling.sampler import Level, RowSampler, SequenceSampler, scores_of
from amusd.types import TopLogprobs


@dataclass(frozen=True, kw_only=True)
class Request:
    """The order to decode one prompt."""

    prompt: tuple[int, ...]
    max_length: int
    policy: Policy
    drafter: str | None
    """None: decode without a draft."""
    distribution: Distribution = GREEDY
    logprobs: bool = False
    top_logprobs: int = 0
    max_silence_seconds: float = 0.3
    reference: tuple[int, ...] = ()


def prepare_to_verify(model: ModelRunner, cache: KVCache) -> None:
    """Prepare every pass that a `Verifier` asks for."""
    state, _ = model.sampling_state(cache)
    model.prepare(cache, [RowSampler(state, level) for level in Level])


class Verifier:
    """Judges the candidates of one request."""

    def __init__(self, model: ModelRunner, request: Request, cache: KVCache) -> None:
        self._model = model
        self._cache = cache
        self._request = request
        self.scores: Sequence[tuple[float, TopLogprobs]] = ()
        """Log-probability of each token of the last pass, and the likeliest in its place; empty unless asked for."""
        # None if each token is that of the largest logit: then logits stay on the device.
        self._sampler: SequenceSampler | None = None
        distribution, is_scored = request.distribution, request.logprobs
        if is_scored or not distribution.is_argmax:
            make = RatioTest if distribution.rule == "rejection" else SequenceSampler
            state, number = model.sampling_state(cache)
            self._sampler = make(distribution, state, request.prompt, sequence=number, is_scored=is_scored)

    def begin(self, session: TargetSession, num_candidates: int, breadth: int, min_chance: float = 0.0) -> Block:
        """The next block, with up to `breadth` candidates at each position, as far as the pass has room."""
        if self._sampler is not None and self._sampler.needs_context:
            self._sampler.see(session.committed)
        if breadth > 1:
            num_tracks = min(breadth, self._model.numerics.tracks_at(session.committed_length - 1))
            max_rows = self._model.numerics.width
            return session.begin(num_candidates, num_tracks=num_tracks, max_rows=max_rows, min_chance=min_chance)
        return session.begin(num_candidates)

    def rows(self, block: Block) -> Rows:
        """The rows that a pass computes to judge `block`."""
        wanted, parents = None, block.parents if block.alternatives else None
        if self._sampler is not None:
            inputs = self._sampler.inputs(block.start, block.token_ids, parents)
            wanted = SamplerRows(self._sampler.sampler, inputs)
        return Rows(block.token_ids, self._cache, wanted, parents)

    def judge_again(self, session: TargetSession, block: Block) -> Acceptance:
        """Repeat the pass without candidates, and judge it. Overwrites the logits of the last pass."""
        cache = self._cache
        cache.truncate(block.start)
        self._model.wipe(cache)
        block = Block(block.start, block.last_token, ())
        [output] = self._model.run([self.rows(block)])
        try:
            return self.judge(session, block, output)
        except NotFiniteError as error:
            cache.truncate(0)  # the prompt's keys and values may be no numbers either
            self._model.wipe(cache)
            raise NotFiniteError(
                f"target: {error} at position {block.start + 1}, prompt included: its weights are damaged, or overflow "
                "in target.dtype (float32 holds the largest numbers)"
            ) from None

    def judge(self, session: TargetSession, block: Block, output: ModelOutput) -> Acceptance:
        """The tokens that a pass over `block` commits. Without alternatives, a candidate that came late is judged too.

        Raises `NotFiniteError` if a logit that counts is not finite.
        """
        judged, draft_probs = session.to_judge()
        judged = judged[: len(block.token_ids)]  # a repeated pass has fewer rows
        if isinstance(self._sampler, RatioTest):
            return self._by_ratio(self._sampler, block.start, output, judged, draft_probs[: len(judged)])
        with_late = block if block.alternatives else replace(block, candidates=judged)
        return self._by_equality(with_late, output, len(block.token_ids))

    def _by_ratio(
        self, test: RatioTest, start: int, output: ModelOutput, judged: Sequence[int], draft_probs: Sequence[Any]
    ) -> Acceptance:
        assert output.wanted is not None
        output.check()
        acceptance = test.accept(output.logits, start, output.wanted.inputs, judged, draft_probs)
        if self._request.logprobs:
            number = len(acceptance.token_ids)
            chosen = test.state.send(torch.tensor(acceptance.token_ids)).unsqueeze(1)
            logprobs = output.logits[:number].float().log_softmax(1).gather(1, chosen)
            tops = [scores_of(output.sample(row)[1], self._request.top_logprobs)[1] for row in range(number)]
            self.scores = list(zip(test.state.fetch(logprobs.squeeze(1)).tolist(), tops, strict=True))
        return acceptance

    def _by_equality(self, block: Block, output: ModelOutput, num_rows: int) -> Acceptance:
        found: dict[int, npt.NDArray[np.int32]] = {}

        def choose(row: int) -> int:
            column, found[row] = output.sample(row)
            return column

        acceptance, rows = accept_along(choose, block.next_row, num_rows)
        if block.alternatives:
            self._model.keep(rows, self._cache)
        if self._request.logprobs:
            self.scores = [scores_of(found[row], self._request.top_logprobs) for row in rows]
        return acceptance
