"""Any causal language model with the target's tokenizer, drafting greedily one token a step.

context   [0, length)            tokens taken in, the tail included
cache     [0, cache_length)      keys and values present; at most length - 1, so that a step always has an input
"""

from __future__ import annotations

from collections.abc import Sequence

from amusd.drafters.context import Context
from amusd.models.language_model import KVCache, LanguageModel


class AutoregressiveDrafter:
    """Drafts with `model`. The cache is kept between sequences and grows when a longer one is opened."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._context = Context()
        self._cache: KVCache | None = None

    @property
    def length(self) -> int:
        """Tokens in the context."""
        return self._context.length

    @property
    def tokens_per_step(self) -> int:
        """One: each token costs a forward pass."""
        return 1

    @property
    def cache_length(self) -> int:
        """Positions whose keys and values are held."""
        return 0 if self._cache is None else self._cache.length

    def open(self, token_ids: Sequence[int], capacity: int) -> None:
        """Start from `token_ids`; all but the last go through the model at once."""
        self._context.open(token_ids, capacity)
        if self._cache is None or self._cache.capacity < capacity:
            self._cache = self._model.new_cache(capacity)
        self._cache.truncate(0)
        self._model.prefill(token_ids[:-1], self._cache)

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """`max_tokens` greedy tokens, fewer at the end of the capacity."""
        proposed: list[int] = []
        for _ in range(min(max_tokens, self._context.capacity - self._context.length)):
            token_id = self._next_token()
            self._context.append((token_id,))
            proposed.append(token_id)
        return tuple(proposed)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append the target's tokens; they go through the model with the next step."""
        self._context.append(token_ids)

    def truncate(self, length: int) -> None:
        """Keep `length` tokens. The last of them stays outside the cache: the next step needs it as its input."""
        self._context.truncate(length)
        if self._cache is not None:
            self._cache.truncate(min(self._cache.length, length - 1))

    def close(self) -> None:
        """Keep the cache's memory for the next sequence."""
        if self._cache is not None:
            self._cache.truncate(0)
        self._context = Context()

    def _next_token(self) -> int:
        cache = self._cache
        assert cache is not None, "propose before open"
        while True:
            start = cache.length
            pending = self._context.token_ids[start : start + self._model.max_rows(start)]
            chosen = self._model.choose(pending, cache)
            if cache.length == self._context.length:
                return chosen[-1]
