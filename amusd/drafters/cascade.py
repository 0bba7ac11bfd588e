"""A drafter that drafts for a drafter: a model judges in each pass what a faster drafter proposes to it.

The model's own choices are what the cascade proposes to the target: those that the inner drafter foresaw, and the one
behind them. So it makes several tokens a pass, and each is the token that it would have made in a pass of its own. It
draws as the target would (`SequenceSampler`), and the inner drafter draws with the same noise: the two agree often.

That holds for the ratio test, too. A token that the cascade proposes was drawn from the model's row, which goes with
it. The inner drafter decides only how many tokens a pass makes, and that by tokens before them: whether a token is
proposed does not depend on its value.

context   [0, length)            tokens taken in; the inner drafter holds the same
cache     [0, length - 1)        keys and values of the model, at most; a pass writes behind them and is cut back

On a GPU a pass has the captured shape of the model's full width, however many tokens were foreseen; the inner drafter's
steps are shapes of their own. Between the two its tokens pass through the host.

References:
    Chen et al. 2024, Cascade Speculative Drafting, https://arxiv.org/abs/2312.11462 (there vertical cascade)
    Spector and Re 2023, Staged Speculative Decoding, https://arxiv.org/abs/2308.04623
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import Self

from amusd.drafters.autoregressive import AutoregressiveDrafter
from amusd.drafters.base import ChainDrafter, say_not_finite
from amusd.errors import NotFiniteError
from amusd.models.language_model import KVCache, LanguageModel, ModelOutput, SamplerRows, SequenceRows
from amusd.sampling.acceptance import accept_along
from amusd.sampling.ratio_test import DraftSampler
from amusd.sampling.sampler import DRAFT_LEVELS, samplers_of


@dataclass(frozen=True, slots=True)
class _Block:
    """The rows of one sequence in a pass."""

    rows: SequenceRows
    start: int
    """Position of its first token."""
    num_pending: int
    """Tokens of the context, which come first; candidates follow."""


class CascadeDrafter(AutoregressiveDrafter):
    """Drafts with `model`, and with `inner` for it."""

    def __init__(
        self,
        model: LanguageModel,
        inner: ChainDrafter,
        num_inner_tokens: int = 4,
        *,
        cache: KVCache | None = None,
        num_inner_ids: int = 0,
    ) -> None:
        """`num_inner_tokens`: candidates of a pass at most; `cache`: one of `new_caches`.

        `num_inner_ids`: token ids that `inner` takes in, `[0, num_inner_ids)`; 0: all.
        """
        super().__init__(model, cache=cache)
        self.inner = inner
        self._num_inner_tokens = num_inner_tokens
        self._num_inner_ids = num_inner_ids
        self._inner_capacity = 0
        """Longest sequence of `inner`, which may have fewer positions: behind them the model drafts alone."""
        self._output_ids = None if model.output_ids is None else model.output_ids.tolist()

    @property
    def tokens_per_step(self) -> int:
        """As many as a pass can make."""
        return self._num_inner_tokens + 1

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        """Start from `token_ids`, both drafters."""
        self.inner.set_distribution(self._distribution)
        self._inner_capacity = min(capacity, self.inner.max_length or capacity)
        # first: it may work on another device meanwhile
        self.inner.open(self._known(token_ids)[: self._inner_capacity], self._inner_capacity)
        super().open(token_ids, capacity, fan_out)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append tokens to both."""
        super().commit(token_ids)
        self._commit_inner(token_ids)

    def truncate(self, length: int) -> None:
        """Keep `length` tokens of both."""
        super().truncate(length)
        self._truncate_inner(length)

    def close(self) -> None:
        """Release both."""
        super().close()
        self.inner.close()

    def _prepare(self) -> None:
        """Prepare every pass that is asked for: each is one step, the last row's token chosen with the others."""
        self.model.prepare(self._cache, samplers_of(self.model, self._cache, DRAFT_LEVELS))

    @classmethod
    def _extend(cls, drafters: Sequence[Self], max_tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """The model's own tokens along the inner drafters' proposals, from one pass for all."""
        if not drafters:
            return []
        inner = [drafter.inner for drafter in drafters]
        numbers = [drafter.num_candidates(number) for drafter, number in zip(drafters, max_tokens, strict=True)]
        proposed = type(inner[0]).propose_together(inner, numbers)
        blocks = [drafter.plan(candidates) for drafter, candidates in zip(drafters, proposed, strict=True)]
        outputs = drafters[0].model.forward_batch([block.rows for block in blocks])
        together = zip(drafters, blocks, outputs, strict=True)
        return [drafter.judge(block, output) for drafter, block, output in together]

    def num_candidates(self, max_tokens: int) -> int:
        """How many tokens to ask of the inner drafter: the pass makes one more, and has room for all of them."""
        if self.inner.length < self.length:
            return 0
        most = min(max_tokens, self._capacity - self.length, self.model.max_rows(self.length - 1))
        return min(self._num_inner_tokens, most - 1)

    def plan(self, candidates: Sequence[int]) -> _Block:
        """The next pass. The inner drafter holds the candidates already."""
        self.inner.take_rows()  # the model's rows count, not what candidates were drawn from
        pending = self._catch_up(len(candidates))
        token_ids, start, wanted = [*pending, *candidates], self._cache.length, None
        if self._sampler is not None:
            self._sampler.see(self._context)
            wanted = SamplerRows(self._sampler.sampler, self._sampler.rows(start, token_ids))
        return _Block(SequenceRows(token_ids, self._cache, wanted), start, len(pending))

    def judge(self, block: _Block, output: ModelOutput) -> tuple[int, ...]:
        """The model's choices along the candidates; both drafters go on behind them."""
        length, token_ids = self.length, block.rows.token_ids
        candidates = token_ids[block.num_pending :]

        def next_row(row: int, token_id: int) -> int | None:
            return row + 1 if row < len(candidates) and candidates[row] == token_id else None

        try:

            def choose(row: int) -> int:
                column = self._draw(block, output, row + block.num_pending - 1)
                return column if self._output_ids is None else self._output_ids[column]

            acceptance, _ = accept_along(choose, next_row, len(candidates) + 1)
        except NotFiniteError as error:
            self.undo_rows()
            self._truncate_inner(length)
            say_not_finite(error)
            return ()
        num_accepted, chosen = acceptance.num_accepted, acceptance.token_ids
        super().commit(chosen)
        self._cache.truncate(self.length - 1)
        self._truncate_inner(length + num_accepted)
        self._commit_inner(chosen[num_accepted:])
        return chosen

    def _draw(self, block: _Block, output: ModelOutput, row: int) -> int:
        """The column chosen behind a row."""
        wanted = block.rows.wanted
        if isinstance(self._sampler, DraftSampler):
            assert wanted is not None
            output.sample(row, None)  # raises for what is no number
            return self._sampler.draw(output.logits[row : row + 1], wanted.inputs[row : row + 1])
        return output.sample(row, wanted)[0]

    def _commit_inner(self, token_ids: Sequence[int]) -> None:
        self.inner.commit(self._known(token_ids)[: self._inner_capacity - self.inner.length])

    def _truncate_inner(self, length: int) -> None:
        self.inner.truncate(min(length, self.inner.length))

    def _known(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The same for the inner drafter, whose model may have fewer ids: another token stands for those."""
        if not self._num_inner_ids:
            return token_ids
        return [token_id if token_id < self._num_inner_ids else 0 for token_id in token_ids]
