"""What the events of a draft that prepares for several verdicts show: whether its further guesses were right."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from amusd.tracing.drafted import drafts_tree
from amusd.tracing.recorder import Event


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
        if "kept_steps" in event.fields:
            first = event.fields["committed_length"] - event.fields["num_adopted"] - len(event.fields["kept_steps"])
            kept.update(range(first, first + len(event.fields["kept_steps"])))
            if event.fields["num_adopted"]:
                missed.add(first + len(event.fields["kept_steps"]))
    for event in target:
        fields = event.fields
        if event.name == "target_pass" and fields.get("num_rescued"):
            yield True
        if event.name == "target_pass" and fields["num_accepted"] < min(fields["num_judged"], fields["num_tokens"]):
            position = fields["committed_length"] - 1
            if position in kept or position in missed:
                yield position in kept


def _fan_out(draft: Sequence[Event]) -> int:
    """The most guesses behind a node, from the growth of the tree between two steps that follow each other."""
    most, length = 1, None
    for event in draft:
        if event.name == "draft_step":
            num_nodes = event.fields["num_tokens"]
            if length is not None and num_nodes:
                most = max(most, -(-(event.fields["length"] - length) // num_nodes))
            length = event.fields["length"]
        elif event.name in ("advance", "rollback"):
            length = None  # what else it threw away is not told
        elif event.name == "draft_prefill":
            length = event.fields["num_tokens"]
    return most
