"""Checks that your own drafter keeps the promises of `amusd/drafters/base.py`.

    check_drafter(lambda: MyDrafter(...), vocab_size=100)

A broken promise raises `AssertionError`. The checks use ids below `vocab_size` (4 or more), sequences of up to
`CAPACITY` tokens, and one seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from amusd.drafters.base import Drafter
from amusd.protocol.draft_tree import Node
from amusd.protocol.messages import Open, Verdict
from amusd.runtime.draft_worker import draft_step
from amusd.runtime.rollback import RollbackManager

CAPACITY = 60
FAN_OUT = 3
_LOOKAHEAD = 6
_NUM_HISTORIES = 40
_RELATIVE = 1e-3


def check_drafter(make: Callable[[], Drafter], *, vocab_size: int, fan_outs: Sequence[int] = (1, FAN_OUT)) -> None:
    """Check that a drafter guesses as a fresh one would, after any verdicts.

    `make`: returns a new drafter for sequences of `CAPACITY` tokens; `fan_outs`: 1 for chains, more for trees.
    """
    rng = random.Random(0)  # noqa: S311 - no secret
    drafter = make()  # one for all sequences, which begin alike
    text: tuple[int, ...] = ()
    for _ in range(_NUM_HISTORIES):
        fan_out = rng.choice(fan_outs)
        text = (*text[: rng.randint(0, 20)], *rng.choices(range(vocab_size), k=rng.randint(1, 12)))
        manager = _manager(drafter, text, fan_out)
        for _ in range(rng.randint(0, 8)):
            draft_step([manager])
            tokens = _foreseen(manager.session.tree.root, rng) or rng.choices(range(vocab_size), k=1)
            _follow(manager, tokens)
        draft_step([manager])
        known = {node.token_id for node in manager.session.tree.root.children}
        missed = next((token_id for token_id in range(vocab_size) if token_id not in known), None)
        if missed is not None and manager.session.base + 2 <= CAPACITY:
            _follow(manager, [missed])  # the tree is dropped
            fresh = _manager(make(), manager.session.committed, fan_out)
            for step in range(4):
                for each in (manager, fresh):
                    if each.has_work:
                        draft_step([each])
                if not _same(_tree(manager), _tree(fresh)):
                    raise AssertionError(
                        f"step {step} after {manager.session.committed}: a fresh one guesses otherwise"
                    )
            fresh.close()
        text = manager.session.committed
        for _ in range(2):  # closing is idempotent
            manager.close()


def _manager(drafter: Drafter, token_ids: Sequence[int], fan_out: int) -> RollbackManager:
    rows = 4 if fan_out > 1 else 1
    opening = Open(0, 1, tuple(token_ids), CAPACITY, "", _LOOKAHEAD, 1, fan_out=fan_out, rows_per_step=rows)
    manager = RollbackManager(opening, drafter)
    manager.open()
    return manager


def _follow(manager: RollbackManager, token_ids: Sequence[int]) -> None:
    base = manager.session.base
    if base + len(token_ids) <= CAPACITY:
        manager.apply(Verdict(0, 1, 0, base, tuple(token_ids)))


def _foreseen(node: Node, rng: random.Random) -> list[int]:
    tokens = []
    while node.children and rng.random() < 0.7:
        node = rng.choice(node.children)
        tokens.append(node.token_id)
    return tokens


def _tree(manager: RollbackManager) -> list[tuple[int, int, float]]:
    return [(node.position, node.token_id, node.probability) for node in manager.session.tree.root.below()]


def _same(one: Sequence[tuple[int, int, float]], other: Sequence[tuple[int, int, float]]) -> bool:
    return len(one) == len(other) and all(
        a[:2] == b[:2] and math.isclose(a[2], b[2], rel_tol=_RELATIVE) for a, b in zip(one, other, strict=True)
    )
