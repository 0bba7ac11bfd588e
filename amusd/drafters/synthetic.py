"""A draft for measurements: its steps cost a model's time, and its tokens are right with a chosen probability.

In a tree the target's token is the first guess with probability `accept`; otherwise each further guess is right with
probability `ACCEPT_NEXT`, given that those before it are wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from typing_extensions import Self

from amusd.drafters.base import Expansion, chain_of, path_to
from amusd.drafters.model import ModelDrafter
from amusd.models.kv_cache import KVCache
from amusd.protocol import prefix_hash
from amusd.protocol.draft_tree import Guesses
from amusd.runner.model_runner import ModelRunner

Schedule = Callable[[int], bool]
"""Position (absolute) -> whether its proposal is the target's own token."""
_UNJUDGED = 0
"""Token after the reference's end, where the target's is unknown."""
ACCEPT_NEXT = 0.4
"""Probability that a tree's further guess is right where those before it are wrong."""


def right_with_probability(probability: float, seed: int) -> Schedule:
    """A schedule that is right with this probability at each position."""

    def schedule(position: int) -> bool:
        mixed = ((position + 1) * 0x9E3779B97F4A7C15 ^ (seed + 1) * 0xC2B2AE3D27D4EB4F) & (2**64 - 1)
        mixed = ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        return (mixed ^ (mixed >> 32)) % 2**32 < probability * 2**32

    return schedule


def guess_weights(accept: float, accept_next: float, num_places: int) -> tuple[float, ...]:
    """Each guess's probability: `accept` for the first, then `accept_next` times the rest."""
    weights, left = [accept], 1.0 - accept
    for _ in range(num_places - 1):
        weights.append(left * accept_next)
        left -= weights[-1]
    return tuple(weights)


class SyntheticDrafter(ModelDrafter):
    """Replaces what `model` guesses; the model spends the time.

    The same text gives the same right and wrong positions in every mode. Where the answer departs from the reference
    (possible with `verify_width=bucketed`), no later token is right.
    """

    def __init__(self, model: ModelRunner, accept: float, *, cache: KVCache | None = None) -> None:
        """`cache`: see `ModelDrafter`."""
        super().__init__(model, cache=cache)
        self._accept = accept
        self.set_reference(())

    def set_reference(self, token_ids: Sequence[int]) -> None:
        """See `Drafter`."""
        self._reference = list(token_ids)
        self._seed = functools.reduce(prefix_hash.extend, self._reference, prefix_hash.EMPTY)
        self._is_first = right_with_probability(self._accept, self._seed)

    @classmethod
    def step(cls, drafters: Sequence[Self], parts: Sequence[Expansion]) -> list[Sequence[Guesses]]:
        """As many tokens of a chain as the model proposes, or a tree's guesses."""
        found = super().step(drafters, parts)
        return [drafter.replaced(part, own) for drafter, part, own in zip(drafters, parts, found, strict=True)]

    def replaced(self, part: Expansion, found: Sequence[Guesses]) -> Sequence[Guesses]:
        """The guesses that replace those that the model `found`."""
        if self.fan_out > 1:
            return [self.guesses(path_to(part.root, node)) for node in part.nodes]
        self.take_draft_probs()  # the tokens are certain, not drawn from the model's rows
        start = self.length + len(part.path)
        tokens = [self._token_at(position) for position in range(start, start + len(found))]
        self.text.token_ids[start:] = tokens  # else the next step would roll back the model's tokens
        return chain_of(tokens)

    def guesses(self, path: Sequence[int]) -> Guesses:
        """A tree's guesses after the committed tokens and `path`."""
        text, number = [*self.committed, *path], self.fan_out
        position = len(text)
        is_right = self._reference[:position] == text and position < len(self._reference)
        right = self._reference[position] if is_right else -1
        others = [right_with_probability(ACCEPT_NEXT, self._seed + rank) for rank in range(1, number)]
        rank = next((rank for rank, is_at in enumerate([self._is_first, *others]) if is_at(position)), number)
        weights = guess_weights(self._accept, ACCEPT_NEXT, number)
        tokens = [place if right < 0 or place < right else place + 1 for place in range(number)]  # all wrong
        if right >= 0 and rank < number:
            tokens[rank] = right
        return [*zip(tokens, weights, strict=True)]

    def _token_at(self, position: int) -> int:
        if position >= len(self._reference):
            return _UNJUDGED
        right = self._reference[position]
        if self._is_first(position):
            return right
        return right - 1 if right else 1  # an id of the target's vocabulary, however large that is
