"""The tokens of a simulation: the target's are fixed, and the draft's own are right or wrong by position alone.

So every schedule meets the same answers. A draft with several guesses has its own token first; the place of the right
one depends on the position alone, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise, repeat
from random import Random
from typing import TypeAlias

from amusd.drafters.synthetic import guess_weights

Script: TypeAlias = tuple[bool, ...]
"""For each position, whether the draft's own token is the target's."""

Trace: TypeAlias = tuple[bool | None, ...]
"""An answer as a run has shown it; None where the draft's token was not compared."""


def target_token(position: int) -> int:
    """Return the target's id at a position of the answer."""
    return 2 * position


def draft_token(position: int, is_right: bool, place: int) -> int:
    """Return the draft's id at that position; wrong guesses at different places differ."""
    return 2 * position if is_right else 2 * (position + place) + 1


def drawn_answers(accept: float, *, num_answers: int, num_tokens: int, seed: int) -> tuple[Script, ...]:
    """Make answers in which exactly a share `accept` of all tokens is right, in runs of random order.

    Each length of run occurs as often as expected, so a few answers suffice.
    """
    answers = []
    num_right = [round(accept * num_tokens * number) for number in range(num_answers + 1)]
    for number, (before, after) in enumerate(pairwise(num_right)):
        runs = _run_lengths(after - before, num_tokens - (after - before))
        Random(f"tokens {number} {seed}").shuffle(runs)  # noqa: S311 - nothing here is secret
        answers.append(tuple(right for run in runs for right in (*repeat(True, run), False))[:num_tokens])
    return tuple(answers)


def _run_lengths(num_right: int, num_wrong: int) -> list[int]:
    lengths = [0] * (num_wrong + 1)
    expected, left = float(len(lengths)), num_right
    while left:
        expected *= num_right / (num_right + len(lengths))
        number = min(left, max(1, round(expected)))
        for index in range(number):
            lengths[index] += 1
        left -= number
    return lengths


def guess_places(answer: Script, accept_next: float, num_places: int, seed: str) -> tuple[int, ...]:
    """For each position, the place of the target's token among the guesses; `num_places` if none.

    The share of right guesses at each place is exact; more places leave earlier ones unchanged.
    """
    found = [0 if right else num_places for right in answer]
    wrong = [position for position, right in enumerate(answer) if not right]
    Random(f"places {seed}").shuffle(wrong)  # noqa: S311
    for place in range(num_places - 1, 0, -1):
        for position in wrong[: round((1 - (1 - accept_next) ** place) * len(wrong))]:
            found[position] = place
    return tuple(found)


@lru_cache(maxsize=64)
def all_guesses(
    answer: Script, accept: float, accept_next: float, num_places: int, seed: str
) -> tuple[tuple[tuple[int, float], ...], ...]:
    """The guesses at each position, with their probabilities; the same for all schedules."""
    weights = guess_weights(accept, accept_next, num_places)
    return tuple(
        tuple((draft_token(position, place == right, place), weight) for place, weight in enumerate(weights))
        for position, right in enumerate(guess_places(answer, accept_next, num_places, seed))
    )


def replayed_answers(traces: Sequence[Trace], seed: int) -> tuple[Script, ...]:
    """Answers like the traces; unknown tokens are drawn at the rate of each trace's known ones."""
    answers = []
    for index, trace in enumerate(traces):
        rate = statistics.fmean(known for known in trace if known is not None)
        random = Random(f"unknown {seed} {index}")  # noqa: S311
        drawn = [random.random() < rate for _ in trace]
        answers.append(tuple(d if known is None else known for known, d in zip(trace, drawn, strict=True)))
    return tuple(answers)
