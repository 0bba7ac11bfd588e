"""Prompt lookup: finds earlier places of the last tokens and drafts their continuation, alone or beside a small model.

Earlier answers are searched as well, if asked. The longest match is the best; among equals, the latest.

In a mixture, q is the small model's probability of a token. If the token followed the last n tokens earlier, its weight
is the greater of q and exp(bias) q^slope. `WEIGHTS` has the bias and the slope for each n.

References:
    Prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding
    SuffixDecoding (trees of continuations, earlier answers), https://arxiv.org/abs/2411.04975
    Grave, Joulin and Usunier 2017, Improving Neural Language Models with a Continuous Cache
    Cleary and Witten 1984, Data Compression Using Adaptive Coding and Partial String Matching (backing off)
    Klakow 1998, Log-Linear Interpolation of Language Models
"""

from __future__ import annotations

from collections.abc import Sequence

from amusd.config.engine import MAX_MATCH
from amusd.drafters.base import Drafter, path_to
from amusd.protocol.draft_tree import Guesses, Node

_BIASES = (-0.2, 0.0, 0.5, 1.0, 1.2, 1.2, 1.4, 1.9, 1.9, 1.9, 1.9, 3.5)
_SLOPES = (0.6, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.2)
WEIGHTS = tuple(zip(_BIASES, _SLOPES, strict=True))
"""Bias and slope of a token that followed a suffix of 1, 2, ... tokens (last: or more).

Fitted to the embedded pair (`experiments/embedded_draft/README.md`). The last ones are for loops, which that text
lacks.
"""
CHANCES = (0.0, 0.21, 0.51, 0.62, 0.71, 0.77, 0.79, 0.82, 0.82, 0.95)
"""`CHANCES[n]`: chance that the token after a match of n tokens (last: n or more) follows again; embedded target."""
MAX_CONTINUATIONS = 3
LOOKUP_TOKENS = 8
"""Most tokens of a path that a tree looks up."""
_MAX_OCCURRENCES = 32
"""Latest places of a suffix that are compared."""
_MIXED_LENGTHS = (1, 2)
"""Lengths, in tokens, of suffixes whose continuations a tree mixes in."""


class SuffixIndex:
    """Index of a text: from n tokens to the places after them."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.token_ids: list[int] = []
        self._lengths = lengths
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        for token_id in token_ids:
            self.token_ids.append(token_id)
            end = len(self.token_ids)
            for length in self._lengths:
                if length <= end:
                    self._ends.setdefault(tuple(self.token_ids[-length:]), []).append(end)

    def matches(self, context: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Earlier places with the last tokens of `context`, for suffixes of these `lengths`.

        Returns pairs, best first: number of agreeing tokens, at most all of `context`, and their end.
        """
        places: set[int] = set()
        for length in lengths:
            if length <= len(context):
                most = MAX_CONTINUATIONS + 1 if length == 1 else _MAX_OCCURRENCES
                places.update(self._ends.get(tuple(context[-length:]), ())[-most:])  # one may be the end itself
        found = [(self._agreement(end, context), end) for end in places if end < len(self.token_ids)]
        return sorted(found, reverse=True)

    def _agreement(self, end: int, context: Sequence[int]) -> int:
        tokens, number, most = self.token_ids, 0, min(end, len(context))
        while number < most and tokens[end - 1 - number] == context[-1 - number]:
            number += 1
        return number


class EarlierAnswers:
    """The latest answers, for all drafters that were made together.

    Two indexes hold at most `num_tokens` tokens: when the younger has half of that, the older is forgotten.
    """

    def __init__(self, num_tokens: int) -> None:
        self._half = num_tokens // 2
        self.indexes: list[SuffixIndex] = []
        """The oldest first; read-only for drafters."""

    def add(self, token_ids: Sequence[int], lengths: Sequence[int]) -> None:
        """Keep a text, or its end; `lengths` are those of the drafters' own indexes."""
        kept = token_ids[-self._half :] if self._half else ()
        if not self.indexes or len(self.indexes[-1].token_ids) + len(kept) > self._half:
            self.indexes = [*self.indexes[-1:], SuffixIndex(lengths)]
        self.indexes[-1].append(kept)


class NgramCache:
    """Finds earlier continuations of a sequence's last tokens, in the sequence or in earlier answers."""

    def __init__(self, min_lookup: int = 1, earlier: EarlierAnswers | None = None) -> None:
        """`min_lookup`: least tokens that agree before a `continuation`; no more than `MAX_MATCH` are compared."""
        self._earlier = earlier or EarlierAnswers(0)
        doubled = (min_lookup << shift for shift in range(MAX_MATCH.bit_length()))
        self._lookup_lengths = sorted((length for length in doubled if length <= MAX_MATCH), reverse=True)
        self._lengths = sorted({*_MIXED_LENGTHS, *self._lookup_lengths})
        self.open(())

    def open(self, token_ids: Sequence[int]) -> None:
        """Start from `token_ids`, to which the drafter appends committed tokens."""
        self._committed, self._num_opened = token_ids, len(token_ids)
        self._index = SuffixIndex(self._lengths)

    def close(self) -> None:
        """Forget the sequence; its answer, with the prompt's last tokens, becomes an earlier one."""
        token_ids = self._committed
        if len(token_ids) > self._num_opened:
            self._earlier.add(token_ids[max(0, self._num_opened - MAX_MATCH) :], self._lengths)
        self.open(())

    def guesses(self, path: Sequence[int] = ()) -> list[tuple[int, float, float]]:
        """Tokens that may follow the committed ones and `path`: a `Mixture` of `ranking.py`."""
        found = self.continuations(path)
        return [(token_id, *WEIGHTS[min(agreement, len(WEIGHTS)) - 1]) for token_id, agreement in found]

    def continuations(self, path: Sequence[int] = ()) -> list[tuple[int, int]]:
        """Different tokens that followed before, and how many tokens agreed; the best first."""
        found: dict[int, int] = {}
        for agreement, index, end in self._matches(path, _MIXED_LENGTHS):
            found.setdefault(index.token_ids[end], agreement)
            if len(found) == MAX_CONTINUATIONS:
                break
        return list(found.items())

    def continuation(self, max_tokens: int, path: Sequence[int] = ()) -> tuple[tuple[int, ...], int]:
        """Up to `max_tokens` tokens that followed the longest suffix, and how many tokens agree.

        A continuation that reaches the end of the text repeats. Empty if fewer than `min_lookup` tokens agree.
        """
        for length in self._lookup_lengths:
            if matches := self._matches(path, [length]):
                agreement, index, end = matches[0]
                if index is not self._index:
                    return tuple(index.token_ids[end : end + max_tokens]), agreement
                following = [*index.token_ids[end : end + max_tokens], *path]
                return tuple(following[offset % len(following)] for offset in range(max_tokens)), agreement
        return (), 0

    def _matches(self, path: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, SuffixIndex, int]]:
        """Earlier places of the last tokens: number of agreeing tokens, text, and their end.

        Best first; among equals the sequence's own, then the latest text's.
        """
        self._index.append(self._committed[len(self._index.token_ids) :])
        context = [*self._committed[-MAX_MATCH:], *path][-MAX_MATCH:]
        texts = [self._index, *reversed(self._earlier.indexes)]
        found = [(agreement, index, end) for index in texts for agreement, end in index.matches(context, lengths)]
        return sorted(found, key=lambda match: -match[0])


class NgramDrafter(Drafter):
    """Proposes what followed the longest suffix, of `min_lookup` to `MAX_MATCH` tokens; in a tree, several tokens."""

    def __init__(self, min_lookup: int = 1, earlier: EarlierAnswers | None = None) -> None:
        self._min_lookup = min_lookup
        self._ngrams = NgramCache(min_lookup, earlier)

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        """See `Drafter`."""
        super().open(token_ids, capacity, fan_out)
        self._ngrams.open(self.committed)

    def propose(self, path: Sequence[int], room: int) -> Sequence[int]:
        """See `Drafter`."""
        return self._ngrams.continuation(room, path)[0]

    def expand(self, root: Node, nodes: Sequence[Node], room: int = 1) -> Sequence[Guesses]:
        """The continuation of a chain, or the tokens that followed each node's path earlier."""
        if self.fan_out == 1:
            return super().expand(root, nodes, room)
        found = [self._ngrams.continuations(path_to(root, node)) for node in nodes]
        return [chances_of([one for one in own if one[1] >= self._min_lookup][: self.fan_out]) for own in found]

    def look_up(self) -> tuple[Sequence[int], float]:
        """The continuation of the longest suffix after a tree's committed tokens, and its chance."""
        if self.fan_out == 1:
            return (), 0.0
        found, agreement = self._ngrams.continuation(LOOKUP_TOKENS)
        return found, CHANCES[min(agreement, len(CHANCES) - 1)]

    def close(self) -> None:
        """Forget the sequence; the answer is kept if earlier answers are searched."""
        self._ngrams.close()


def chances_of(continuations: Sequence[tuple[int, int]]) -> list[tuple[int, float]]:
    """Each continuation's chance: `CHANCES` times the rest, halved for each earlier one."""
    rest, weight, found = 1.0, 1.0, []
    for token_id, agreement in continuations:
        share = rest * weight * CHANCES[min(agreement, len(CHANCES) - 1)]
        found.append((token_id, share))
        rest -= share
        weight /= 2
    return found
