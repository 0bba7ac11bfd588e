"""Greedy acceptance: a candidate is accepted when it is the target's own choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What one verification commits."""

    token_ids: tuple[int, ...]
    """The accepted candidates, then the target's recovered or bonus token if there is one."""
    num_accepted: int
    """How many of them were candidates."""


def accept_greedy(target_token_ids: Sequence[int], candidates: Sequence[int]) -> Acceptance:
    """Compare candidates with the target's choices.

    `target_token_ids[i]` is the target's argmax at candidate i's position, given that all before were accepted: one for
    each candidate that went through the pass, and one behind them. `candidates` may have that one more (a late one).
    """
    num_accepted = 0
    for choice, candidate in zip(target_token_ids, candidates, strict=False):
        if choice != candidate:
            break
        num_accepted += 1
    return Acceptance(tuple(target_token_ids[: num_accepted + 1]), num_accepted)
