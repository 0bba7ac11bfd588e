"""Acceptance by equality: a candidate is accepted when it is the target's own choice.

Greedy decoding and matching (`matching.py`) share it: in both, the target's token does not depend on any candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What one verification commits."""

    token_ids: tuple[int, ...]
    """The accepted candidates, then the target's recovered or bonus token if there is one."""
    num_accepted: int
    """How many of them were candidates."""


def accept_along(
    choose: Callable[[int], int], next_row: Callable[[int, int], int | None], num_rows: int
) -> tuple[Acceptance, tuple[int, ...]]:
    """Follow the target's choices from row 0 on, through candidates that equal them; also returns the rows followed.

    `choose(row)`: the target's choice behind that row of the pass, which has `num_rows`; asked along the path only.
    `next_row(row, token_id)`: the row of the candidate `token_id` behind `row`, None where there is no such candidate;
    it is `num_rows` for one that came too late for the pass.
    """
    token_ids: list[int] = []
    rows = [0]
    while rows[-1] < num_rows:
        token_ids.append(choose(rows[-1]))
        row = next_row(rows[-1], token_ids[-1])
        if row is None:
            break
        rows.append(row)
    return Acceptance(tuple(token_ids), len(rows) - 1), tuple(row for row in rows if row < num_rows)


def accept_equal(target_token_ids: Sequence[int], candidates: Sequence[int]) -> Acceptance:
    """Compare candidates with the target's choices.

    `target_token_ids[i]` is the target's choice at candidate i's position, given that all before were accepted: one for
    each candidate that went through the pass, and one behind them. `candidates` may have that one more (a late one).
    """
    num_accepted = 0
    for choice, candidate in zip(target_token_ids, candidates, strict=False):
        if choice != candidate:
            break
        num_accepted += 1
    return Acceptance(tuple(target_token_ids[: num_accepted + 1]), num_accepted)
