"""The seam between the draft worker and whatever proposes tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from amusd.config import Distribution


class Drafter(Protocol):
    """Proposes continuations of one sequence. Its context is the sequence's token stream, tail included.

    Guarantees of every implementation (`tests/drafters/test_contract.py` runs them all):

    * After `open`, `propose`, `commit` and `truncate` the context is exactly the tokens taken in; `length` counts it.
    * What is proposed depends on the context alone: `propose` after `truncate` equals `propose` of a fresh drafter that
      was opened with the same tokens.
    * `truncate` is O(1) apart from dropping its own tokens, and checks before it changes anything.
    """

    @property
    def length(self) -> int:
        """Tokens in the context."""
        ...

    @property
    def tokens_per_step(self) -> int:
        """How many tokens one step of this drafter yields at no extra cost: 1 for a model, many for a lookup."""
        ...

    def open(self, token_ids: Sequence[int], capacity: int) -> None:
        """Forget everything and start from `token_ids`, one at least. `capacity`: longest context ever asked for."""
        ...

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """Up to `max_tokens` tokens that may follow the context; they become part of it. Empty: nothing to propose."""
        ...

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the target chose."""
        ...

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of the context. Raises `ValueError` unless `1 <= length <= self.length`."""
        ...

    def close(self) -> None:
        """Release the sequence's memory or keep it for the next `open`. Idempotent."""
        ...


@runtime_checkable
class ReferenceDrafter(Protocol):
    """A `Drafter` that has to know the target's answer in advance."""

    def set_reference(self, token_ids: Sequence[int]) -> None:
        """The target's whole text of the sequence that is opened next, prompt included."""
        ...


@runtime_checkable
class SamplingDrafter(Protocol):
    """A `Drafter` that draws its tokens as the target does, to guess right more often."""

    def set_distribution(self, distribution: Distribution) -> None:
        """What the target draws the tokens of the sequence from that is opened next."""
        ...

    def take_rows(self) -> tuple[bytes, ...]:
        """Under the ratio test: what each token of the last proposal was drawn from; empty if nothing was drawn."""
        ...
