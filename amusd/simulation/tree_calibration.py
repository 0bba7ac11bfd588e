"""What the events of a draft that prepares for several verdicts show: whether its further guesses were right."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from amusd.tracing.drafted import drafts_tree
from amusd.tracing.events import DraftPrefill, DraftStep, Event, TargetPass, VerdictTaken


def accept_next_of(sequences: Iterable[tuple[Sequence[Event], Sequence[Event]]]) -> float | None:
    """How likely each further guess is right where those before it are wrong, from the events of target and draft.

    A rejected candidate was one of several guesses, and the draft kept its place if another one was right. All further
    guesses are taken to be equally good, and those too unlikely to be made to have been wrong. None without any.
    """
    known = [(target, draft) for target, draft in sequences if drafts_tree(draft)]
    hits = [hit for target, draft in known for hit in _hits(target, draft)]
    num_further = max((_fan_out(draft) for _, draft in known), default=1) - 1
    if not hits or num_further < 1:
        return None
    return 1.0 - math.pow(1.0 - sum(hits) / len(hits), 1.0 / num_further)


def _hits(target: Sequence[Event], draft: Sequence[Event]) -> Iterator[bool]:
    """Of each rejected candidate whose verdict the draft took in: was the target's own token in the tree?"""
    kept: set[int] = set()
    missed: set[int] = set()
    for event in draft:
        if isinstance(event, VerdictTaken) and event.kept_steps is not None:
            kept.update(range(event.kept_length - len(event.kept_steps), event.kept_length))
            if event.num_adopted:
                missed.add(event.kept_length)
    for event in target:
        if isinstance(event, TargetPass) and event.num_rescued:
            yield True
        if isinstance(event, TargetPass) and event.has_rejected:
            position = event.committed_length - 1
            if position in kept or position in missed:
                yield position in kept


def _fan_out(draft: Sequence[Event]) -> int:
    """The most guesses behind a node, from the growth of the tree between two steps that follow each other."""
    most, length = 1, None
    for event in draft:
        if isinstance(event, DraftStep):
            if length is not None and event.num_tokens:
                most = max(most, -(-(event.length - length) // event.num_tokens))
            length = event.length
        elif isinstance(event, VerdictTaken):
            length = None  # what else it threw away is not told
        elif isinstance(event, DraftPrefill):
            length = event.num_tokens
    return most
