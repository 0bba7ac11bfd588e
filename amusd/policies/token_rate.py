"""Tokens per second, lately."""

from __future__ import annotations


class TokenRate:
    """Of passes, those of the past weighing less."""

    def __init__(self, memory: float) -> None:
        """`memory`: weight of the past, for each pass."""
        self._memory = memory
        self._num_tokens = self._seconds = 0.0

    @property
    def tokens_per_second(self) -> float:
        """0 before the first pass."""
        return self._num_tokens / self._seconds if self._seconds else 0.0

    def passed(self, num_tokens: int, seconds: float) -> None:
        """Committed in so long."""
        self._num_tokens = self._memory * self._num_tokens + num_tokens
        self._seconds = self._memory * self._seconds + seconds
