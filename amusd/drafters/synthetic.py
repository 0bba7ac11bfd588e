"""A draft for measurements: it costs what a model's steps cost, and is right with a chosen probability.

In a tree the target's token is the first guess with probability `accept`; otherwise each further guess is right with
probability `accept_next`, given that those before it are wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from typing_extensions import Self

from amusd.config import Distribution
from amusd.drafters.base import Drafter, Expansion, path_to
from amusd.protocol import prefix_hash
from amusd.protocol.draft_session import Guesses, Node, Transition

Schedule = Callable[[int], bool]
"""Position (absolute) -> whether its proposal is the target's own token."""
_UNJUDGED = 0


ACCEPT_NEXT = 0.4
"""Probability that a tree's further guess is right where those before it are wrong."""


def right_with_probability(probability: float, seed: int) -> Schedule:
    """Right with this probability at each position, by the seed."""

    def schedule(position: int) -> bool:
        mixed = ((position + 1) * 0x9E3779B97F4A7C15 ^ (seed + 1) * 0xC2B2AE3D27D4EB4F) & (2**64 - 1)
        mixed = ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        return (mixed ^ (mixed >> 32)) % 2**32 < probability * 2**32

    return schedule


def guess_weights(accept: float, accept_next: float, num_places: int) -> tuple[float, ...]:
    """Return each guess's probability: `accept` for the first, then `accept_next` times what is left."""
    weights, left = [accept], 1.0 - accept
    for _ in range(num_places - 1):
        weights.append(left * accept_next)
        left -= weights[-1]
    return tuple(weights)


class SyntheticDrafter(Drafter):
    """Replaces what `model` guesses; the model spends the time.

    The same text gives the same right and wrong positions in every mode. Where the answer departs from the reference
    (possible with `verify_width=bucketed`), nothing is right any more.
    """

    def __init__(self, model: Drafter, accept: float, accept_next: float, vocab_size: int) -> None:
        """`vocab_size`: of the model; the target's ids are reduced to it."""
        self.model = model
        self._accept = accept
        self._accept_next = accept_next
        self._vocab_size = vocab_size
        self._fan_out = 1
        self._follows = True
        self.set_reference(())

    @property
    def length(self) -> int:
        """The model's."""
        return self.model.length

    @property
    def max_length(self) -> int | None:
        """The model's."""
        return self.model.max_length

    @property
    def tokens_per_step(self) -> int:
        """The model's."""
        return self.model.tokens_per_step

    @property
    def tokens_per_replay(self) -> int:
        """The model's."""
        return self.model.tokens_per_replay

    def set_reference(self, token_ids: Sequence[int]) -> None:
        """See `Drafter`."""
        self._reference = tuple(token_ids)
        self._seed = functools.reduce(prefix_hash.extend, self._reference, prefix_hash.EMPTY)
        self._is_first = right_with_probability(self._accept, self._seed)

    def set_distribution(self, distribution: Distribution) -> None:
        """The model draws and ranks as it would, which costs what it costs."""
        self.model.set_distribution(distribution)

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        """Start from `token_ids`."""
        self._fan_out = fan_out
        self._follows = self._reference[: len(token_ids)] == tuple(token_ids)
        self.model.open(_reduced(token_ids, self._vocab_size), capacity, fan_out)

    @classmethod
    def expand_together(cls, drafters: Sequence[Self], parts: Sequence[Expansion]) -> list[Sequence[Guesses]]:
        """As many tokens of a chain as its model proposes, or a tree's guesses."""
        models = [drafter.model for drafter in drafters]
        found = models[0].expand_together(models, parts)
        return [drafter.replaced(part, len(own)) for drafter, part, own in zip(drafters, parts, found, strict=True)]

    def replaced(self, part: Expansion, number: int) -> Sequence[Guesses]:
        """The guesses that take the place of the model's `number` entries."""
        if self._fan_out > 1:
            return [self._guesses(part.root, node) for node in part.nodes]
        first = part.nodes[-1].position + 1
        return [((self._token_at(position), 1.0),) for position in range(first, first + number)]

    def follow(self, transition: Transition) -> None:
        """Follow the committed tokens."""
        committed = (*(node.token_id for node in transition.kept), *transition.token_ids)
        end = transition.committed_length
        self._follows = self._follows and self._reference[end - len(committed) : end] == committed
        self.model.follow(replace(transition, token_ids=tuple(_reduced(transition.token_ids, self._vocab_size))))

    def close(self) -> None:
        """Release the sequence; the reference stays."""
        self.model.close()

    def _token_at(self, position: int) -> int:
        if position >= len(self._reference):
            return _UNJUDGED
        right = self._reference[position]
        if self._is_first(position):
            return right
        return right - 1 if right else 1  # an id of the target's vocabulary, however large that is

    def _guesses(self, root: Node, node: Node) -> Guesses:
        position = node.position + 1
        is_right = self._follows and self._reference[root.position + 1 : position] == tuple(path_to(root, node))
        right = self._reference[position] if is_right and position < len(self._reference) else -1
        others = [right_with_probability(self._accept_next, self._seed + rank) for rank in range(1, self._fan_out)]
        rank = next((rank for rank, is_at in enumerate([self._is_first, *others]) if is_at(position)), self._fan_out)
        weights = guess_weights(self._accept, self._accept_next, self._fan_out)
        tokens = [place if right < 0 or place < right else place + 1 for place in range(self._fan_out)]  # all wrong
        if right >= 0 and rank < self._fan_out:
            tokens[rank] = right
        return [*zip(tokens, weights, strict=True)]


def _reduced(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    return [token_id % vocab_size for token_id in token_ids]
