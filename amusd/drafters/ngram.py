"""Prompt lookup: what followed the latest earlier occurrence of the last few tokens. Needs no weights.

References:
    Prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding
"""

from __future__ import annotations

from collections.abc import Sequence

from amusd.drafters.base import ChainDrafter
from amusd.drafters.context import Context


class NgramDrafter(ChainDrafter):
    """Looks up the longest suffix of `min_ngram` to `max_ngram` tokens, and proposes what followed its last occurrence.

    For each suffix length the index maps an n-gram to the positions behind its occurrences, in order; appending a token
    adds one entry for each length, cutting one removes them, so every operation costs what it moves.
    """

    def __init__(self, min_ngram: int = 2, max_ngram: int = 4) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram {min_ngram} and max_ngram {max_ngram} do not fit together")
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self._context = Context()
        self._ends: dict[tuple[int, ...], list[int]] = {}

    @property
    def length(self) -> int:
        """Tokens in the context."""
        return self._context.length

    @property
    def tokens_per_step(self) -> int:
        """A lookup yields as many as are wanted."""
        return self._context.capacity or 1

    @property
    def has_match(self) -> bool:
        """Whether a suffix of the context has occurred before."""
        return self._source() is not None

    def start(self, token_ids: Sequence[int], capacity: int) -> None:
        """Start from `token_ids` and index them."""
        self._context.open(token_ids, capacity)
        self._ends = {}
        for end in range(1, self.length + 1):
            self._index(end)

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """Up to `max_tokens` tokens; none when no suffix occurred before.

        A continuation that runs into the end of the context goes on through what it has just proposed, as a loop does.
        """
        source = self._source()
        wanted = min(max_tokens, self._context.capacity - self.length)
        if source is None or wanted <= 0:
            return ()
        token_ids = self._context.token_ids
        period = self.length - source
        proposed = tuple(token_ids[source + offset % period] for offset in range(wanted))
        self.commit(proposed)
        return proposed

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append tokens and index them."""
        start = self.length
        self._context.append(token_ids)
        for end in range(start + 1, self.length + 1):
            self._index(end)

    def truncate(self, length: int) -> None:
        """Keep `length` tokens, and only what the index knows of them."""
        removed = range(self.length, length, -1) if 1 <= length <= self.length else ()
        for end in removed:
            for ngram in self._ngrams_ending_at(end):
                ends = self._ends[ngram]
                ends.pop()
                if not ends:
                    del self._ends[ngram]
        self._context.truncate(length)

    def close(self) -> None:
        """Forget the sequence."""
        self._context = Context()
        self._ends = {}

    def _ngrams_ending_at(self, end: int) -> list[tuple[int, ...]]:
        return [tuple(self._context.token_ids[end - n : end]) for n in self._lengths if n <= end]

    def _index(self, end: int) -> None:
        for ngram in self._ngrams_ending_at(end):
            self._ends.setdefault(ngram, []).append(end)

    def _source(self) -> int | None:
        """Where the continuation starts: behind the latest earlier occurrence of the longest suffix that has one."""
        for ngram in self._ngrams_ending_at(self.length):
            ends = self._ends[ngram]
            if len(ends) > 1:
                return ends[-2]
        return None
