"""Which draft tokens were right, read from both workers' events in one sequence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from amusd.simulation.tokens import Trace
from amusd.tracing.drafted import drafts_tree
from amusd.tracing.events import DraftPrefill, DraftStep, Event, TargetPass, VerdictTaken


def trace_of(target: Sequence[Event], draft: Sequence[Event]) -> Trace:
    """For each position, whether the draft's own token was the target's; None if unknown.

    A pass tells it up to the first rejected candidate. A token that was committed before the draft's own arrived is
    compared when its verdict comes. A draft that proposed nothing was not right.
    """
    passes = [event for event in target if isinstance(event, TargetPass)]
    if not passes:
        return ()
    start = passes[0].start_length
    known: dict[int, bool] = {}
    for done in passes:
        end = done.start_length + done.num_accepted
        known.update((position, True) for position in range(done.start_length, end))
        if done.num_accepted_alternatives:  # an alternative took the place of the draft's own token, which was wrong
            known[end - done.num_accepted_alternatives] = False
        if done.has_rejected:
            known[end] = False
    is_chain, base = not drafts_tree(draft), start
    for event in draft:
        if isinstance(event, DraftPrefill):
            base = event.num_tokens
        elif isinstance(event, DraftStep) and not event.num_tokens:
            known.setdefault(event.length, False)
        elif isinstance(event, VerdictTaken) and is_chain:
            for position in range(base, event.kept_length):
                known.setdefault(position, True)
            if event.num_discarded:
                known.setdefault(event.kept_length, False)
            base = event.committed_length
    return tuple(known.get(position) for position in range(start, passes[-1].committed_length))


def accept_next_of(sequences: Iterable[tuple[Sequence[Event], Sequence[Event]]]) -> float | None:
    """How likely each further guess is right if those before it are wrong; None if no tree shows it.

    `sequences`: events of target and draft. After a rejected candidate, the draft kept its place if another guess was
    right. All further guesses are taken to be equally good.
    """
    trees = [(target, draft) for target, draft in sequences if drafts_tree(draft)]
    hits = [hit for target, draft in trees for hit in _hits(target, draft)]
    if not hits:
        return None
    num_further = max(event.fan_out for _, draft in trees for event in draft if isinstance(event, DraftPrefill)) - 1
    return 1.0 - math.pow(1.0 - sum(hits) / len(hits), 1.0 / num_further)


def _hits(target: Sequence[Event], draft: Sequence[Event]) -> Iterator[bool]:
    kept: set[int] = set()
    missed: set[int] = set()
    for event in draft:
        if isinstance(event, VerdictTaken) and event.kept_steps is not None:
            kept.update(range(event.kept_length - len(event.kept_steps), event.kept_length))
            if event.num_adopted:
                missed.add(event.kept_length)
    for event in target:
        if isinstance(event, TargetPass) and event.num_accepted_alternatives:
            yield True
        if isinstance(event, TargetPass) and event.has_rejected:
            position = event.committed_length - 1
            if position in kept or position in missed:
                yield position in kept
