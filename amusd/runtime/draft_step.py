"""One step of a draft: choose the nodes to compute, have their drafters guess what follows, grow the trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from amusd.drafters.base import Expansion
from amusd.protocol.draft_tree import Guesses, Node, next_nodes
from amusd.runtime.rollback import RollbackManager
from amusd.sampling.acceptance import certain

StepShare: TypeAlias = tuple[Sequence[Node], Sequence[Guesses]]
"""What a step did for one sequence: the nodes that it computed, and the guesses behind them; both may be empty."""


def draft_step(managers: Sequence[RollbackManager], row_share: float = 0.0) -> list[StepShare]:
    """Compute the most valuable nodes of sequences whose drafters were made together; the share of each.

    It is urgent where it computes a root, which has no candidate yet: it ends once a message is ready. `row_share`: see
    `next_nodes`.
    """
    chosen = next_nodes([manager.session.tree for manager in managers], row_share)
    working = [(manager, nodes) for manager, nodes in zip(managers, chosen, strict=True) if nodes]
    is_urgent = any(manager.session.tree.root in nodes for manager, nodes in working)
    parts = []
    for manager, nodes in working:
        session, least = manager.session, 1 if is_urgent else manager.drafter.tokens_per_replay
        num_tokens = min(session.tree.room, max(session.opening.tokens_per_message, least))
        parts.append(Expansion(session.tree.root, nodes, num_tokens, session.tree.room))
    drafters = [manager.drafter for manager, _ in working]
    found = drafters[0].step(drafters, parts) if drafters else []
    for (manager, nodes), guesses in zip(working, found, strict=True):
        probs: Sequence[bytes] = ()
        if manager.distribution.rule == "rejection":
            probs = manager.drafter.take_draft_probs() or [certain(token_id) for ((token_id, _),) in guesses]
        manager.session.tree.grow(nodes, guesses, probs)
    shares = iter(found)
    return [(nodes, next(shares) if nodes else ()) for nodes in chosen]
