"""Which of the draft's tokens were right, read from the events of both workers in one sequence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from amusd.simulation.tokens import Trace
from amusd.tracing.drafted import drafts_tree
from amusd.tracing.recorder import Event


def trace_of(target: Sequence[Event], draft: Sequence[Event]) -> Trace:
    """Return, for each position of the answer, whether the draft's own token was the target's; None if unknown.

    A pass tells it for the candidates up to the first rejected one. A token that was committed before the draft's own
    arrived is compared by the draft when its verdict comes. A draft that proposed nothing (a lookup that found nothing)
    was not right.
    """
    passes = [event.fields for event in target if event.name == "target_pass"]
    if not passes:
        return ()
    start = passes[0]["committed_length"] - passes[0]["num_tokens"]
    known: dict[int, bool] = {}
    for fields in passes:
        first = fields["committed_length"] - fields["num_tokens"]
        num_accepted, num_rescued = fields["num_accepted"], fields.get("num_rescued", 0)
        known.update((position, True) for position in range(first, first + num_accepted))
        if num_rescued:  # an alternative took the place of the draft's own token, which was wrong
            known[first + num_accepted - num_rescued] = False
        if num_accepted < min(fields["num_judged"], fields["num_tokens"]):
            known[first + num_accepted] = False
    is_chain, base = not drafts_tree(draft), start
    for event in draft:
        fields = event.fields
        if event.name == "draft_prefill":
            base = fields["num_tokens"]
        elif event.name == "draft_step" and not fields["num_tokens"]:
            known.setdefault(fields["length"], False)
        elif event.name in ("advance", "rollback") and is_chain:
            end = fields["committed_length"] - fields["num_adopted"]  # of the committed tokens that the chain held
            for position in range(base, end):
                known.setdefault(position, True)
            if fields["num_discarded"]:
                known.setdefault(end, False)
            base = fields["committed_length"]
    return tuple(known.get(position) for position in range(start, passes[-1]["committed_length"]))


def accept_next_of(sequences: Iterable[tuple[Sequence[Event], Sequence[Event]]]) -> float | None:
    """Return how likely each further guess is right if those before it are wrong; None if no tree shows it.

    `sequences`: the events of target and draft. A rejected candidate was one of several guesses, and the draft kept its
    place if another one was right. All further guesses are taken to be equally good, and those too unlikely to be made
    to have been wrong.
    """
    trees = [(target, draft) for target, draft in sequences if drafts_tree(draft)]
    hits = [hit for target, draft in trees for hit in _hits(target, draft)]
    num_further = max((_fan_out(draft) for _, draft in trees), default=1) - 1
    if not hits or num_further < 1:
        return None
    return 1.0 - math.pow(1.0 - sum(hits) / len(hits), 1.0 / num_further)


def _hits(target: Sequence[Event], draft: Sequence[Event]) -> Iterator[bool]:
    """Yield, for each rejected candidate whose verdict the draft took in, whether the tree held the target's token."""
    kept: set[int] = set()
    missed: set[int] = set()
    for event in draft:
        if "kept_steps" in event.fields:
            end = event.fields["committed_length"] - event.fields["num_adopted"]
            kept.update(range(end - len(event.fields["kept_steps"]), end))
            if event.fields["num_adopted"]:
                missed.add(end)
    for event in target:
        fields = event.fields
        if event.name == "target_pass" and fields.get("num_rescued"):
            yield True
        if event.name == "target_pass" and fields["num_accepted"] < min(fields["num_judged"], fields["num_tokens"]):
            position = fields["committed_length"] - 1
            if position in kept or position in missed:
                yield position in kept


def _fan_out(draft: Sequence[Event]) -> int:
    """Return the most guesses behind a node: the growth of the tree between two steps that follow each other."""
    most, length = 1, None
    for event in draft:
        if event.name == "draft_step":
            num_nodes = event.fields["num_tokens"]
            if length is not None and num_nodes:
                most = max(most, -(-(event.fields["length"] - length) // num_nodes))
            length = event.fields["length"]
        elif event.name in ("advance", "rollback"):
            length = None  # the event does not tell how many nodes went
        elif event.name == "draft_prefill":
            length = event.fields["num_tokens"]
    return most
