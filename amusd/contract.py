"""Checks for drafters of your own: what every drafter promises (`amusd/drafters/base.py`).

    check_chain_drafter(lambda: MyDrafter(...), vocab_size=100)

A broken promise raises `AssertionError`. The checks use ids below `vocab_size`, 4 at least, sequences of up to
`CAPACITY` tokens, and a seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from amusd.config import GREEDY
from amusd.drafters.base import ChainDrafter, Drafter
from amusd.protocol.draft_session import Node
from amusd.protocol.messages import Open, Verdict
from amusd.runtime.rollback import RollbackManager, propose

CAPACITY = 60
_FAN_OUT = 3
_RELATIVE = 1e-3


def check_chain_drafter(
    make: Callable[[], ChainDrafter], *, vocab_size: int, num_histories: int = 60, seed: int = 0
) -> None:
    """Check a drafter of chains. `make`: a new one, the same each time."""
    rng = random.Random(seed)  # noqa: S311 - no secret
    for _ in range(num_histories):
        _check_history(make, rng, vocab_size)
    _check_limits(make)


def _check_history(make: Callable[[], ChainDrafter], rng: random.Random, vocab_size: int) -> None:
    drafter = make()
    if before := rng.choices(range(vocab_size), k=rng.randint(0, 12)):
        drafter.open(before, CAPACITY)
        drafter.propose(3)
        drafter.close()
        drafter.close()
    context = rng.choices(range(vocab_size), k=rng.randint(1, 12))
    drafter.open(context, CAPACITY)
    for _ in range(rng.randint(0, 8)):
        action, tokens = rng.choice(("propose", "commit", "cut")), rng.choices(range(vocab_size), k=rng.randint(1, 12))
        if action == "propose":
            context += drafter.propose(min(len(tokens), CAPACITY - len(context)))
        elif action == "commit" and len(context) + len(tokens) <= CAPACITY:
            drafter.commit(tokens)
            context += tokens
        elif action == "cut":
            del context[rng.randint(1, len(context)) :]
            drafter.truncate(len(context))
        _expect(drafter.length == len(context), f"it holds {drafter.length} tokens of {len(context)} after {action}")
    fresh = make()
    fresh.open(context, CAPACITY)
    wanted = min(6, CAPACITY - len(context))
    proposed, expected = drafter.propose(wanted), fresh.propose(wanted)
    _expect(proposed == expected, f"it proposes {proposed}, and a fresh one {expected}, behind {context}")


def _check_limits(make: Callable[[], ChainDrafter]) -> None:
    drafter, untouched = make(), make()
    for each in (drafter, untouched):
        each.open([1, 2, 1, 2, 1], 10)
    for length in (0, -1, 6):
        _expect_value_error(lambda length=length: drafter.truncate(length), "cut")  # type: ignore[misc]
    _expect_value_error(lambda: drafter.commit([1] * 6), "capacity")
    _expect(drafter.length == 5, "a refused call changes its length")
    _expect(drafter.propose(3) == untouched.propose(3), "a refused call changes what it proposes")
    _expect(drafter.length <= 8, "it proposes more than is asked for")
    drafter.propose(50)
    _expect(drafter.length <= 10, "it proposes beyond its capacity")
    drafter.commit([1] * (10 - drafter.length))
    _expect(drafter.propose(5) == (), "it proposes where there is no room")
    _expect_value_error(lambda: drafter.open([1, 2, 3, 0], 3), "start")


def check_tree_drafter(make: Callable[[], Drafter], *, vocab_size: int, num_histories: int = 40, seed: int = 0) -> None:
    """Check that a drafter of trees guesses as a fresh one would, after any verdicts.

    `make`: a new one, the same each time, for sequences of `CAPACITY` tokens and a fan-out of 3.
    """
    rng = random.Random(seed)  # noqa: S311 - no secret
    for _ in range(num_histories):
        manager = _manager(make(), rng.choices(range(vocab_size), k=rng.randint(1, 12)))
        for _ in range(rng.randint(0, 8)):
            propose([manager])
            tokens = _foreseen(manager.session.root, rng) or rng.choices(range(vocab_size), k=1)
            _follow(manager, tokens)
        propose([manager])
        known = {node.token_id for node in manager.session.root.children}
        missed = next((token_id for token_id in range(vocab_size) if token_id not in known), None)
        if missed is None or manager.session.base + 2 > CAPACITY:
            continue
        _follow(manager, [missed])  # whatever was prepared is gone
        fresh = _manager(make(), manager.session.committed)
        for step in range(4):
            for each in (manager, fresh):
                if each.has_work:
                    propose([each])
            _expect(_same(_tree(manager), _tree(fresh)), f"step {step} behind {manager.session.committed} differs")
        for each in (manager, fresh):
            each.close()
            each.close()


def _manager(drafter: Drafter, token_ids: Sequence[int]) -> RollbackManager:
    return RollbackManager(Open(0, 1, tuple(token_ids), CAPACITY, "", 6, 1, (), GREEDY, _FAN_OUT, 4), drafter)


def _follow(manager: RollbackManager, token_ids: Sequence[int]) -> None:
    base = manager.session.base
    if base + len(token_ids) <= CAPACITY:
        manager.apply(Verdict(0, 1, 0, base, tuple(token_ids), 0))


def _foreseen(node: Node, rng: random.Random) -> list[int]:
    tokens = []
    while node.children and rng.random() < 0.7:
        node = rng.choice(node.children)
        tokens.append(node.token_id)
    return tokens


def _tree(manager: RollbackManager) -> list[tuple[int, int, float]]:
    return [(node.position, node.token_id, node.probability) for node in manager.session.root.below()]


def _same(one: Sequence[tuple[int, int, float]], other: Sequence[tuple[int, int, float]]) -> bool:
    return len(one) == len(other) and all(
        a[:2] == b[:2] and math.isclose(a[2], b[2], rel_tol=_RELATIVE) for a, b in zip(one, other, strict=True)
    )


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def _expect_value_error(act: Callable[[], object], word: str) -> None:
    try:
        act()
    except ValueError as error:
        _expect(word in str(error), f"the error does not say {word!r}: {error}")
    else:
        raise AssertionError(f"no ValueError that says {word!r}")
