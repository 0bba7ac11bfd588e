"""Chains of drafters, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence

from amusd.drafters.base import Drafter, Expansion
from amusd.protocol.draft_tree import Node


def propose(drafter: Drafter, number: int, path: Sequence[int] = ()) -> tuple[int, ...]:
    """Up to `number` tokens after the committed ones and `path`."""
    return propose_together([drafter], [path], number)[0]


def propose_together(
    drafters: Sequence[Drafter], paths: Sequence[Sequence[int]], number: int, room: int = 0
) -> list[tuple[int, ...]]:
    """The tokens that each proposes after its path: `number`, or up to `room` if a step makes more."""
    parts = []
    for drafter, path in zip(drafters, paths, strict=True):
        nodes = [Node(None, drafter.committed[-1], drafter.length - 1, 1.0, 1.0)]
        for token_id in path:
            nodes.append(Node(nodes[-1], token_id, nodes[-1].position + 1, 1.0, 1.0))
        parts.append(Expansion(nodes[0], nodes[-1:], number, max(number, room)))
    found = type(drafters[0]).step(drafters, parts)
    return [tuple(token_id for ((token_id, _),) in own) for own in found]
