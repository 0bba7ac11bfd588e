"""A draft for measurements: it costs what a model's steps cost, and is right with a chosen probability.

The model drafts as ever, and its keys and values stay its own; only what is proposed is replaced, token for token, by
what a schedule says. So a step, a rollback and a several-token step cost exactly what they cost with a trained draft.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from amusd.config import Distribution
from amusd.drafters.base import ChainDrafter
from amusd.drafters.context import Context
from amusd.drafters.oracle import right_with_probability
from amusd.protocol import prefix_hash

_UNJUDGED = 0
"""Proposed behind the end of the answer, of which a real draft would not know either."""


class SyntheticDrafter(ChainDrafter):
    """Each proposal is the target's own token with probability `accept`, independent of all others; else another id.

    The same text gives the same right and wrong positions in every mode; different texts give different ones. `accept`
    is what happens to a candidate whose predecessors were accepted. Where the target's answer departs from the
    reference (possible with `verify_width=bucketed`), nothing is right any more.
    """

    def __init__(self, model: ChainDrafter, accept: float, vocab_size: int) -> None:
        """`model` spends the time, on ids in `[0, vocab_size)`: any target fits, as ids are reduced to that range."""
        self._model = model
        self._accept = accept
        self._vocab_size = vocab_size
        self._context = Context()
        self.set_reference(())

    @property
    def length(self) -> int:
        """Tokens in the context."""
        return self._context.length

    @property
    def tokens_per_step(self) -> int:
        """As of the model."""
        return self._model.tokens_per_step

    def set_reference(self, token_ids: Sequence[int]) -> None:
        """The target's whole text of the sequence that is opened next, prompt included."""
        self._reference = tuple(token_ids)
        self._is_right = right_with_probability(
            self._accept, seed=functools.reduce(prefix_hash.extend, self._reference, prefix_hash.EMPTY)
        )

    def set_distribution(self, distribution: Distribution) -> None:
        """The model draws as it would, which costs what it costs; its tokens are replaced all the same."""
        self._model.set_distribution(distribution)

    def start(self, token_ids: Sequence[int], capacity: int) -> None:
        """Start from `token_ids`."""
        self._context.open(token_ids, capacity)
        self._model.open(self._reduced(token_ids), capacity)

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """As many tokens as the model proposes, by the schedule."""
        start = self.length
        num_tokens = len(self._model.propose(max_tokens))
        proposed = tuple(self._token_at(position) for position in range(start, start + num_tokens))
        self._context.append(proposed)
        return proposed

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append the target's tokens."""
        self._context.append(token_ids)
        self._model.commit(self._reduced(token_ids))

    def truncate(self, length: int) -> None:
        """Keep `length` tokens."""
        self._context.truncate(length)
        self._model.truncate(length)

    def close(self) -> None:
        """Release the sequence; the reference stays until the next one is set."""
        self._context = Context()
        self._model.close()

    def _reduced(self, token_ids: Sequence[int]) -> list[int]:
        return [token_id % self._vocab_size for token_id in token_ids]

    def _token_at(self, position: int) -> int:
        if position >= len(self._reference):
            return _UNJUDGED
        right = self._reference[position]
        if self._is_right(position):
            return right
        return right - 1 if right else 1  # an id of the target's vocabulary, however large that is
