"""A model that leaves to prompt lookup what lookup knows better.

Text repeats itself: names, code, lists, and the loops that small models run into. Where a long enough suffix of the
context has occurred before, what followed it then is right more often than a small model is
(`experiments/embedded_draft/` measures from which length on), and costs nothing; elsewhere the model drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

from amusd.config import Distribution
from amusd.drafters.base import ChainDrafter
from amusd.drafters.ngram import NgramDrafter


class LookupFirstDrafter(ChainDrafter):
    """Proposes what `lookup` finds, else what `model` drafts; both follow the same context."""

    def __init__(self, model: ChainDrafter, lookup: NgramDrafter) -> None:
        self._model = model
        self._lookup = lookup

    @property
    def length(self) -> int:
        """Tokens in the context."""
        return self._lookup.length

    @property
    def tokens_per_step(self) -> int:
        """Many where the lookup has something, else as of the model."""
        return (self._lookup if self._lookup.has_match else self._model).tokens_per_step

    def set_distribution(self, distribution: Distribution) -> None:
        """What the model draws from; a lookup draws nothing."""
        self._model.set_distribution(distribution)

    def take_rows(self) -> tuple[bytes, ...]:
        """The model's, where the last proposal was its own."""
        return self._model.take_rows()

    def start(self, token_ids: Sequence[int], capacity: int) -> None:
        """Start from `token_ids`."""
        self._model.open(token_ids, capacity)
        self._lookup.open(token_ids, capacity)

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """What the lookup finds (the model reads it with its next step); without a match, what the model drafts."""
        proposed = self._lookup.propose(max_tokens)
        if proposed:
            self._model.commit(proposed)
            return proposed
        proposed = self._model.propose(max_tokens)
        self._lookup.commit(proposed)
        return proposed

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append the target's tokens."""
        self._lookup.commit(token_ids)  # the one that checks costs nothing
        self._model.commit(token_ids)

    def truncate(self, length: int) -> None:
        """Keep `length` tokens."""
        self._lookup.truncate(length)
        self._model.truncate(length)

    def close(self) -> None:
        """Release the sequence."""
        self._lookup.close()
        self._model.close()
