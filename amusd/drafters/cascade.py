"""A drafter with its own drafter: a model judges in each pass what a faster drafter proposes.

The cascade proposes the model's own choices: those that the inner drafter foresaw, and one more. Both draw with the
target's noise.

Under the ratio test the inner drafter decides only how many tokens a pass makes. It decides by the tokens before, so
whether a token is proposed does not depend on its value.

References:
    Chen et al. 2024, Cascade Speculative Drafting, https://arxiv.org/abs/2312.11462 (there vertical cascade)
    Spector and Re 2023, Staged Speculative Decoding, https://arxiv.org/abs/2308.04623
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from typing_extensions import Self

from amusd.drafters.autoregressive import AutoregressiveDrafter
from amusd.drafters.base import Drafter, Expansion, chain_of
from amusd.errors import NotFiniteError
from amusd.models.cached_model import CachedModel
from amusd.models.kv_cache import KVCache
from amusd.models.passes import ModelOutput, Rows
from amusd.protocol.draft_session import Guesses
from amusd.sampling.acceptance import accept_along
from amusd.sampling.sampler import DRAFT_LEVELS, samplers_of

NUM_INNER_TOKENS = 4
"""Most candidates of the inner drafter in a pass."""


class CascadeDrafter(AutoregressiveDrafter):
    """Drafts chains with `model`, and with `inner` for it."""

    def __init__(self, model: CachedModel, inner: Drafter, *, cache: KVCache | None = None) -> None:
        """`cache`: one of `new_caches`."""
        super().__init__(model, cache=cache)
        self.inner = inner

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        """Start from `token_ids`, both drafters."""
        self.inner.set_distribution(self.distribution)
        most = min(capacity, self.inner.max_length or capacity)
        self.inner.open(token_ids[:most], most)  # first: it may work on another device meanwhile
        super().open(token_ids, capacity, fan_out)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append tokens to both."""
        super().commit(token_ids)
        self.inner.commit(token_ids[: self.inner.capacity - self.inner.length])

    def forget(self) -> None:
        """See `Drafter`."""
        super().forget()
        self.inner.forget()

    def close(self) -> None:
        """Release both."""
        super().close()
        self.inner.close()

    @classmethod
    def expand_together(cls, drafters: Sequence[Self], parts: Sequence[Expansion]) -> list[Sequence[Guesses]]:
        """One pass: the model's choices along what the inner drafters propose."""
        paths = [part.path for part in parts]
        inner = [drafter.inner for drafter in drafters]
        inner_parts = [drafter.inner_part(part) for drafter, part in zip(drafters, parts, strict=True)]
        found = type(inner[0]).expand_together(inner, inner_parts)
        proposed = [[token_id for ((token_id, _),) in guesses] for guesses in found]
        asked = zip(drafters, paths, proposed, strict=True)
        batch = [drafter.rows([*drafter.committed, *path], candidates) for drafter, path, candidates in asked]
        together = zip(drafters, paths, proposed, batch, drafters[0].model.run(batch), strict=True)
        chosen = [drafter.judge(path, tokens, rows, output) for drafter, path, tokens, rows, output in together]
        for each, path, tokens in zip(inner, paths, chosen, strict=True):
            each.foresee([*path, *tokens])
        return [chain_of(tokens) for tokens in chosen]

    def inner_part(self, part: Expansion) -> Expansion:
        """The inner drafter's part of a step. The pass makes one token more than it asks for."""
        length = self.length + len(part.path)
        most = min(part.room, self.model.numerics.max_rows(length - 1)) - 1
        number = max(0, min(NUM_INNER_TOKENS, most, self.inner.capacity - length))
        return replace(part, num_tokens=number, room=number)

    def judge(self, path: Sequence[int], candidates: Sequence[int], rows: Rows, output: ModelOutput) -> tuple[int, ...]:
        """The model's choices behind `path`, along the candidates; none if not finite."""
        self.inner.take_rows()  # the model's rows count, not what candidates were drawn from
        first = len(rows.token_ids) - len(candidates) - 1

        def choose(row: int) -> int:
            return self._draw(output, first + row)

        def next_row(row: int, token_id: int) -> int | None:
            return row + 1 if row < len(candidates) and candidates[row] == token_id else None

        try:
            acceptance, _ = accept_along(choose, next_row, len(candidates) + 1)
        except NotFiniteError as error:
            self.take_rows()
            self._undo(error)
            return ()
        self._keep([*self.committed, *path, *acceptance.token_ids[:-1]])
        return acceptance.token_ids

    def _prepare(self) -> None:
        self.model.prepare(self._cache, samplers_of(self.model, self._cache, DRAFT_LEVELS))
