"""A drafter with its own drafter: a model judges in each pass what a faster drafter proposes.

The cascade proposes the model's own choices: those that the inner drafter foresaw, and one more. Both draw with the
target's noise.

Under the ratio test the inner drafter decides only how many tokens a pass makes, by the tokens before: whether a token
is proposed does not depend on its value.

    context   [0, length)            tokens taken in; the inner drafter holds the same
    cache     [0, length - 1)        the model's keys and values, at most

References:
    Chen et al. 2024, Cascade Speculative Drafting, https://arxiv.org/abs/2312.11462 (there vertical cascade)
    Spector and Re 2023, Staged Speculative Decoding, https://arxiv.org/abs/2308.04623
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import Self

from amusd.drafters.autoregressive import AutoregressiveDrafter
from amusd.drafters.base import ChainDrafter
from amusd.errors import NotFiniteError
from amusd.models.cached_model import CachedModel
from amusd.models.kv_cache import KVCache
from amusd.models.passes import ModelOutput, Rows
from amusd.sampling.acceptance import accept_along
from amusd.sampling.sampler import DRAFT_LEVELS, samplers_of


class CascadeDrafter(AutoregressiveDrafter):
    """Drafts with `model`, and with `inner` for it."""

    def __init__(
        self,
        model: CachedModel,
        inner: ChainDrafter,
        num_inner_tokens: int = 4,
        *,
        cache: KVCache | None = None,
        num_inner_ids: int = 0,
    ) -> None:
        """`num_inner_tokens`: most candidates of a pass; `cache`: one of `new_caches`.

        `num_inner_ids`: `inner` takes in `[0, num_inner_ids)`; 0: all.
        """
        super().__init__(model, cache=cache)
        self.inner = inner
        self._num_inner_tokens = num_inner_tokens
        self._num_inner_ids = num_inner_ids
        self._inner_capacity = 0

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
        self.model.prepare(self._cache, samplers_of(self.model, self._cache, DRAFT_LEVELS))

    @classmethod
    def _extend(cls, drafters: Sequence[Self], max_tokens: Sequence[int]) -> list[tuple[int, ...]]:
        if not drafters:
            return []
        inner = [drafter.inner for drafter in drafters]
        numbers = [drafter.num_candidates(number) for drafter, number in zip(drafters, max_tokens, strict=True)]
        proposed = type(inner[0]).propose_together(inner, numbers)
        batch = [drafter.rows(candidates) for drafter, candidates in zip(drafters, proposed, strict=True)]
        together = zip(drafters, proposed, batch, drafters[0].model.run(batch), strict=True)
        return [drafter.judge(candidates, rows, output) for drafter, candidates, rows, output in together]

    def num_candidates(self, max_tokens: int) -> int:
        """How many tokens to ask of the inner drafter; the pass makes one more."""
        if self.inner.length < self.length:
            return 0
        most = min(max_tokens, self._capacity - self.length, self.model.numerics.max_rows(self.length - 1))
        return min(self._num_inner_tokens, most - 1)

    def judge(self, candidates: Sequence[int], rows: Rows, output: ModelOutput) -> tuple[int, ...]:
        """The model's choices along the candidates; both drafters go on behind them."""
        self.inner.take_rows()  # the model's rows count, not what candidates were drawn from
        length, first = self.length, len(rows.token_ids) - len(candidates) - 1

        def next_row(row: int, token_id: int) -> int | None:
            return row + 1 if row < len(candidates) and candidates[row] == token_id else None

        try:

            def choose(row: int) -> int:
                return self._draw(output, first + row)

            acceptance, _ = accept_along(choose, next_row, len(candidates) + 1)
        except NotFiniteError as error:
            self.take_rows()
            self._undo_rows(error)
            self._truncate_inner(length)
            return ()
        num_accepted, chosen = acceptance.num_accepted, acceptance.token_ids
        super().commit(chosen)
        self._cache.truncate(self.length - 1)
        self._truncate_inner(length + num_accepted)
        self._commit_inner(chosen[num_accepted:])
        return chosen

    def _commit_inner(self, token_ids: Sequence[int]) -> None:
        self.inner.commit(self._known(token_ids)[: self._inner_capacity - self.inner.length])

    def _truncate_inner(self, length: int) -> None:
        self.inner.truncate(min(length, self.inner.length))

    def _known(self, token_ids: Sequence[int]) -> Sequence[int]:
        if not self._num_inner_ids:
            return token_ids
        return [token_id if token_id < self._num_inner_ids else 0 for token_id in token_ids]
