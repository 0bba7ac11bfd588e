"""Prompt lookup, and the n-gram cache of a text that a small model's distribution is mixed with.

Prompt lookup proposes what followed the longest suffix of the text when that occurred before. It needs no weights.

Names, code and lists recur, and a text's rare tokens recur above all, which a draft may not even have in its head. The
tokens that followed the last few tokens when they occurred before share the probability `SHARES[n]`, where n is how
many tokens agree; the rest is the model's. A continuation known from longer agreement comes first, of equal ones the
latest; each takes its share of what those before it have left, and half as much as it would alone for each of them.

References:
    Prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding
    Grave, Joulin and Usunier, Improving Neural Language Models with a Continuous Cache, 2017 (that cache compares
    hidden states, this one tokens). Backing off from long to short suffixes: Cleary and Witten, Data Compression Using
    Adaptive Coding and Partial String Matching, 1984.
"""

from __future__ import annotations

from collections.abc import Sequence

from amusd.drafters.base import ChainDrafter

SHARES = (0.0, 0.08, 0.25, 0.4, 0.6, 0.6, 0.7, 0.7, 0.7, 0.88)
"""How much of the probability belongs to what followed a suffix of so many tokens; the last one: of more. Fitted to the
embedded pair (`experiments/embedded_draft/mixture.py`)."""
MAX_CONTINUATIONS = 3
"""Different tokens that are thought likely at once."""
_MAX_OCCURRENCES = 32
"""Most occurrences that are looked at, the latest ones; of a single token `MAX_CONTINUATIONS` and one."""


class NgramCache:
    """The committed tokens of one sequence, indexed by the last one and the last two before each place."""

    def __init__(self, min_match: int = 1, max_match: int = 12) -> None:
        """`min_match`: tokens that have to agree for a `continuation`; beyond `max_match` more make no difference.

        Raises `ValueError` unless 1 <= `min_match` <= `max_match`.
        """
        if not 1 <= min_match <= max_match:
            raise ValueError(f"min_match {min_match} and max_match {max_match} do not fit together")
        self._min_match, self._max_match = min_match, max_match
        self.open(())

    def open(self, token_ids: Sequence[int]) -> None:
        """Start from `token_ids`."""
        self._token_ids: list[int] = []
        self._ends: dict[int | tuple[int, int], list[int]] = {}
        self.commit(token_ids)

    @property
    def length(self) -> int:
        """Tokens held."""
        return len(self._token_ids)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        for token_id in token_ids:
            if self._token_ids:
                self._ends.setdefault((self._token_ids[-1], token_id), []).append(self.length + 1)
            self._ends.setdefault(token_id, []).append(self.length + 1)
            self._token_ids.append(token_id)

    def guesses(self, path: Sequence[int] = ()) -> list[tuple[int, float]]:
        """Tokens that may follow the committed ones and `path`, and the shares of the probability that are theirs.

        The shares are above 0 and together below 1.
        """
        return shares_of(self.continuations(path))

    def continuations(self, path: Sequence[int] = ()) -> list[tuple[int, int]]:
        """Different tokens that followed before, and how many tokens agreed there; the best first."""
        found: dict[int, int] = {}
        for agreement, end in self._matches(path):
            found.setdefault(self._token_ids[end], agreement)
            if len(found) == MAX_CONTINUATIONS:
                break
        return list(found.items())

    def continuation(self, max_tokens: int) -> tuple[int, ...]:
        """`max_tokens` tokens that followed the longest suffix of the committed ones, or none unless `min_match` agree.

        Where that runs into the end of the text it goes on through what it has just proposed, as a loop does.
        """
        agreement, end = next(iter(self._matches(())), (0, 0))
        if agreement < self._min_match:
            return ()
        period = self.length - end
        return tuple(self._token_ids[end + offset % period] for offset in range(max_tokens))

    def _matches(self, path: Sequence[int]) -> list[tuple[int, int]]:
        """Earlier places where the last tokens occurred: how many of them, and where they end; the best first."""
        suffix = [*self._token_ids[-self._max_match :], *path][-self._max_match :]
        if not suffix:
            return []
        places = set(self._ends.get(suffix[-1], ())[-MAX_CONTINUATIONS - 1 :])  # one may be the end itself
        if len(suffix) > 1:
            places.update(self._ends.get((suffix[-2], suffix[-1]), ())[-_MAX_OCCURRENCES:])
        matches = [(self._agreement(end, suffix), end) for end in places if end < self.length]
        return sorted(matches, reverse=True)

    def _agreement(self, end: int, suffix: Sequence[int]) -> int:
        """How many tokens before `end` are those at the end of `suffix`."""
        number = 0
        while number < min(end, len(suffix)) and self._token_ids[end - 1 - number] == suffix[-1 - number]:
            number += 1
        return number


class NgramDrafter(ChainDrafter):
    """Looks up the longest suffix of `min_ngram` to `max_ngram` tokens, and proposes what followed its last occurrence.

    For each suffix length the index maps an n-gram to the positions behind its occurrences, in order; appending a token
    adds one entry for each length, cutting one removes them, so every operation costs what it moves.
    """

    def __init__(self, min_ngram: int = 2, max_ngram: int = 4) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram {min_ngram} and max_ngram {max_ngram} do not fit together")
        super().__init__()
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self._ends: dict[tuple[int, ...], list[int]] = {}

    @property
    def tokens_per_step(self) -> int:
        """A lookup yields as many as are wanted."""
        return self._capacity or 1

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        """Start from `token_ids` and index them."""
        super().open(token_ids, capacity, fan_out)
        self._ends = {}
        self._index(0)

    def continuation(self, max_tokens: int) -> tuple[int, ...]:
        """Up to `max_tokens` tokens that followed the suffix, within the capacity; none when it did not occur before.

        Where that runs into the end of the context it goes on through what it has just proposed, as a loop does.
        """
        matches = (self._ends[ngram] for ngram in self._ngrams_ending_at(self.length))
        end = next((ends[-2] for ends in matches if len(ends) > 1), self.length)
        period, wanted = self.length - end, min(max_tokens, self._capacity - self.length)
        return tuple(self._context[end + offset % period] for offset in range(wanted if period else 0))

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """Up to `max_tokens` tokens; none when no suffix occurred before."""
        proposed = self.continuation(max_tokens)
        self.commit(proposed)
        return proposed

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append tokens and index them."""
        start = self.length
        super().commit(token_ids)
        self._index(start)

    def truncate(self, length: int) -> None:
        """Keep `length` tokens, and only what the index knows of them."""
        for end in range(self.length, length, -1) if length >= 1 else ():
            for ngram in self._ngrams_ending_at(end):
                self._ends[ngram].pop()
                if not self._ends[ngram]:
                    del self._ends[ngram]
        super().truncate(length)

    def close(self) -> None:
        """Forget the sequence."""
        super().close()
        self._ends = {}

    def _ngrams_ending_at(self, end: int) -> list[tuple[int, ...]]:
        return [tuple(self._context[end - n : end]) for n in self._lengths if n <= end]

    def _index(self, start: int) -> None:
        """Index the tokens from `start` on."""
        for end in range(start + 1, self.length + 1):
            for ngram in self._ngrams_ending_at(end):
                self._ends.setdefault(ngram, []).append(end)


def shares_of(continuations: Sequence[tuple[int, int]], shares: Sequence[float] = SHARES) -> list[tuple[int, float]]:
    """The share of the probability that each of a cache's `continuations` gets."""
    rest, weight, found = 1.0, 1.0, []
    for token_id, agreement in continuations:
        share = rest * weight * shares[min(agreement, len(shares) - 1)]
        found.append((token_id, share))
        rest -= share
        weight /= 2
    return found
