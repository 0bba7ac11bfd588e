"""The committed prefix of one sequence: tokens that the target chose, and that are never changed again.

Every position keeps the rolling hash of the prefix that ends there, so that any earlier prefix can be recognised.
"""

from __future__ import annotations

from collections.abc import Sequence

from amusd.protocol import prefix_hash


class CommittedPrefix:
    """Starts with `token_ids`, and only grows."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids: list[int] = []
        self._hashes: list[int] = [prefix_hash.EMPTY]
        self.append(token_ids)

    @property
    def length(self) -> int:
        """How many tokens they are."""
        return len(self._token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(self._token_ids)

    def slice(self, start: int, stop: int) -> tuple[int, ...]:
        """Tokens at `[start, stop)`."""
        return tuple(self._token_ids[start:stop])

    def hash_before(self, position: int) -> int:
        """Rolling hash of `[0, position)`."""
        return self._hashes[position]

    def append(self, token_ids: Sequence[int]) -> None:
        """Make these tokens final."""
        value = self._hashes[-1]
        for token_id in token_ids:
            value = prefix_hash.extend(value, token_id)
            self._token_ids.append(token_id)
            self._hashes.append(value)
