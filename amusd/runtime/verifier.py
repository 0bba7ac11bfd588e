"""One target pass: what it computes, and which of its tokens become final."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from amusd.config import Distribution
from amusd.errors import NotFiniteError
from amusd.models.language_model import DigestRequest, KVCache, LanguageModel, ModelOutput, SequenceRows
from amusd.protocol.target_session import TargetSession
from amusd.protocol.verification import Block
from amusd.sampling.acceptance import Acceptance, accept_along, accept_equal
from amusd.sampling.digest import Digests
from amusd.sampling.sampler import TargetSampler
from amusd.types import TopLogprobs

T = TypeVar("T")


def prepare_to_verify(model: LanguageModel, cache: KVCache) -> Digests | None:
    """Prepare every pass that a `Verifier` asks for; returns the digests of the model, if its passes end with any."""
    digests = Digests.of(model)
    model.prepare(cache)  # greedy decoding, and the ratio test
    if digests is not None:
        model.prepare(cache, (digests.few, digests.many))
        model.prefill([0] * min(model.prefill_chunk, cache.capacity), cache)  # loads the kernels of prompts
        cache.truncate(0)
    return digests


class Verifier:
    """Judges the candidates of one request: which of them the target accepts."""

    def __init__(
        self,
        model: LanguageModel,
        distribution: Distribution,
        prompt: Sequence[int],
        *,
        logprobs: bool = False,
        top_logprobs: int = 0,
        digests: Digests | None = None,
    ) -> None:
        """`logprobs`, `top_logprobs`: as of `TargetSampler`; `digests`: of `prepare_to_verify`."""
        self._model = model
        # None where each token is that of the largest logit: then logits need not leave the device.
        self._sampler: TargetSampler | None = None
        if logprobs or not distribution.is_argmax:
            self._sampler = TargetSampler(
                distribution,
                model.vocab_size,
                prompt=prompt,
                logprobs=logprobs,
                top_logprobs=top_logprobs,
                digests=digests,
            )

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Log-probabilities of the tokens last judged; empty unless asked for."""
        return () if self._sampler is None else self._sampler.logprobs

    @property
    def top_logprobs(self) -> tuple[TopLogprobs, ...]:
        """The most likely tokens in the place of each of those last judged; empty unless asked for."""
        return () if self._sampler is None else self._sampler.top_logprobs

    @property
    def num_whole_rows(self) -> int:
        """Rows of logits that had to come from the device as a whole, because their digests were not enough."""
        return 0 if self._sampler is None else self._sampler.num_whole_rows

    def begin(self, session: TargetSession, num_candidates: int, breadth: int, min_chance: float = 0.0) -> Block:
        """The next block; with alternatives, up to `breadth` candidates of a position, where the pass has room."""
        if breadth > 1:
            num_tracks = min(breadth, self._model.num_tracks(session.committed_length - 1))
            max_rows = self._model.width
            return session.begin(num_candidates, num_tracks=num_tracks, max_rows=max_rows, min_chance=min_chance)
        return session.begin(num_candidates)

    def rows(self, block: Block, cache: KVCache) -> SequenceRows:
        """The rows that a pass computes to judge `block`."""
        wanted = None
        if self._sampler is not None and (digest := self._sampler.digest) is not None:
            wanted = DigestRequest(digest, self._sampler.path_inputs(block))
        return SequenceRows(block.token_ids, cache, wanted, block.parents if block.alternatives else None)

    def judge(self, session: TargetSession, block: Block, output: ModelOutput, cache: KVCache) -> Acceptance:
        """The tokens that a pass over `block` commits. On one path a candidate that came during the pass may be judged.

        If a logit that counts is NaN or infinite, the pass is made again without candidates, since these must not
        matter; raises `NotFiniteError` if it still is.
        """
        try:
            return self._judge(session, block, output, cache)
        except NotFiniteError:
            cache.truncate(block.start)
            cache.wipe()
        block = Block(block.start, block.last_token, ())
        [output] = self._model.forward_batch([self.rows(block, cache)])
        try:
            return self._judge(session, block, output, cache)
        except NotFiniteError as error:
            cache.truncate(0)  # the prompt's keys and values may be no numbers either
            cache.wipe()
            raise NotFiniteError(
                f"target: {error} at position {block.start + 1}, prompt included: its weights are damaged, or overflow "
                "in target.dtype (float32 holds the largest numbers)"
            ) from None

    def _judge(self, session: TargetSession, block: Block, output: ModelOutput, cache: KVCache) -> Acceptance:
        if block.alternatives:
            acceptance, rows = self._along_paths(block, output)
            self._model.keep(rows, cache)
            return acceptance
        judged = _scored(session.candidates_to_judge(), block)
        if self._sampler is None:
            return accept_equal(output.choose(), judged)
        rows_drawn_from = _scored(session.rows_to_judge(), block)
        return self._sampler.accept(
            output.logits, block.start, block.token_ids, judged, rows_drawn_from, output.digests
        )

    def _along_paths(self, block: Block, output: ModelOutput) -> tuple[Acceptance, tuple[int, ...]]:
        """The same of several paths, and the rows of the accepted one."""
        if self._sampler is not None:
            return self._sampler.accept_paths(output.logits, block, output.digests)
        choices = output.choose()  # [1 + candidates]
        return accept_along(choices.__getitem__, block.next_row, len(choices))


def _scored(judged: tuple[T, ...], block: Block) -> tuple[T, ...]:
    """Those for which a pass over `block` has a row."""
    return judged[: len(block.token_ids)]
