"""Drafters that know the target's answer and are right exactly where their schedule says so.

A schedule says at which positions the proposal is right. Wrong proposals are ids of the vocabulary too, so nothing but
the target's verdict tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from amusd.drafters.base import Drafter
from amusd.drafters.synthetic import Schedule


def always_right() -> Schedule:
    return lambda _position: True


def always_wrong() -> Schedule:
    return lambda _position: False


class OracleDrafter(Drafter):
    """Proposes `reference[position]` where `schedule(position)`, and another id elsewhere.

    `reference` holds the target's whole text, prompt included. Beyond its end there is nothing to propose.
    """

    def __init__(self, reference: Sequence[int], schedule: Schedule, vocab_size: int, tokens_per_step: int = 1) -> None:
        self._tokens_per_step = tokens_per_step
        self._reference = tuple(reference)
        self._schedule = schedule
        self._vocab_size = vocab_size

    def propose(self, path: Sequence[int], room: int) -> tuple[int, ...]:
        start = self.length + len(path)
        stop = min(start + min(room, self._tokens_per_step), len(self._reference))
        return tuple(self._token_at(position) for position in range(start, stop))

    def _token_at(self, position: int) -> int:
        right = self._reference[position]
        return right if self._schedule(position) else (right + 1) % self._vocab_size
