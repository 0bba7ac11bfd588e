"""Which tokens are what: the target's at each position is fixed, and the draft's own is right or wrong there.

Whether it is right depends on the position alone, so every schedule meets the same answers, and their difference is
not one of luck. Behind a wrong token of its own the draft goes on as before; nothing of that is ever accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeAlias

Answer: TypeAlias = tuple[bool, ...]
"""For each position of an answer: is the draft's own token there, behind the right prefix, the target's?"""

Trace: TypeAlias = tuple[bool | None, ...]
"""The same as far as a run has shown it; None where the draft's token was never compared."""


def target_token(position: int) -> int:
    """The target's id at a position of the answer."""
    return 2 * position


def draft_token(position: int, is_right: bool) -> int:
    """What the draft proposes there."""
    return 2 * position + (not is_right)


def vocab_size(num_tokens: int) -> int:
    """Ids that answers of this length need."""
    return 2 * num_tokens


def drawn_answers(accept: float, *, num_answers: int, num_tokens: int, seed: int) -> tuple[Answer, ...]:
    """A share `accept` of all tokens is right, at random positions: independent draws less the luck in their number.

    A token that is right at one `accept` is right at every higher one.
    """
    ranks = list(range(num_answers * num_tokens))
    Random(f"tokens {seed}").shuffle(ranks)  # noqa: S311 - nothing here is secret
    num_right = round(accept * len(ranks))
    return tuple(
        tuple(rank < num_right for rank in ranks[start : start + num_tokens])
        for start in range(0, len(ranks), num_tokens)
    )


def trace_rate(trace: Trace) -> float | None:
    """Share of right tokens among those that were compared; None when none was."""
    known = [outcome for outcome in trace if outcome is not None]
    return sum(known) / len(known) if known else None


def replayed_answers(traces: Sequence[Trace], seed: int) -> tuple[Answer, ...]:
    """What the traces know, and for the rest draws at each trace's own rate; traces that know nothing are left out."""
    answers = []
    for index, trace in enumerate(traces):
        rate = trace_rate(trace)
        if rate is not None:
            random = Random(f"unknown {seed} {index}")  # noqa: S311
            drawn = [random.random() < rate for _ in trace]
            answers.append(tuple(d if known is None else known for known, d in zip(trace, drawn, strict=True)))
    return tuple(answers)
