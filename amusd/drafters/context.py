"""What every drafter keeps: the token stream it continues, with the checks that its contract asks for."""

from __future__ import annotations

from collections.abc import Sequence


class Context:
    """The tokens of one sequence as the drafter sees them."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.capacity = 0

    @property
    def length(self) -> int:
        """Tokens held."""
        return len(self.token_ids)

    def open(self, token_ids: Sequence[int], capacity: int) -> None:
        """Start again from `token_ids`. Raises `ValueError` when there are none, or more than `capacity`."""
        if not 1 <= len(token_ids) <= capacity:
            raise ValueError(f"{len(token_ids)} tokens to start from, between 1 and {capacity} allowed")
        self.token_ids = list(token_ids)
        self.capacity = capacity

    def append(self, token_ids: Sequence[int]) -> None:
        """Append. Raises `ValueError` beyond `capacity`; then nothing changes."""
        if len(self.token_ids) + len(token_ids) > self.capacity:
            raise ValueError(f"{len(self.token_ids)} + {len(token_ids)} tokens, capacity {self.capacity}")
        self.token_ids.extend(token_ids)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens. Raises `ValueError` unless `1 <= length <= self.length`."""
        if not 1 <= length <= len(self.token_ids):
            raise ValueError(f"cannot cut a context of {len(self.token_ids)} tokens to {length}")
        del self.token_ids[length:]
