"""A draft's tree and its drafter's state are rolled back together, or not at all."""

from __future__ import annotations

import logging
import random
import tracemalloc
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
from chains import propose
from runtime.pair import PROMPT, VOCAB_SIZE, target_model
from runtime.table_tree import TableTreeDrafter, spread
from table_model import TableModel

from amusd.drafters.base import Drafter, Expansion
from amusd.drafters.cascade import CascadeDrafter
from amusd.drafters.model import ModelDrafter
from amusd.drafters.ngram import NgramCache, NgramDrafter
from amusd.protocol.draft_tree import Guesses, Node, Transition
from amusd.protocol.messages import Open, Verdict
from amusd.runtime.draft_worker import draft_step
from amusd.runtime.rollback import RollbackManager

OPENINGS = {
    "chain": Open(1, 1, PROMPT, 100, "brittle", 8, 1),
    "tree": Open(1, 1, PROMPT, 100, "brittle", 8, 1, fan_out=3, rows_per_step=2),
}
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "chain": lambda: ModelDrafter(target_model()),
    "tree": lambda: TableTreeDrafter(places=spread(5), ngrams=NgramCache(1)),
}
Result = TypeVar("Result")


class DeviceLostError(RuntimeError):
    """The device was lost in the call with this name."""


class BrittleDrafter(Drafter):
    """Wraps a drafter; the calls that `fails` names raise, before their work or after it."""

    def __init__(self, inner: Drafter, fails: Callable[[str], bool], *, after: bool = False) -> None:
        self._inner, self._fails, self._after = inner, fails, after

    @property
    def length(self) -> int:
        return self._inner.length

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        self._call("open", lambda: self._inner.open(token_ids, capacity, fan_out))

    def expand(self, root: Node, nodes: Sequence[Node], room: int = 1) -> Sequence[Guesses]:
        return self._call("expand", lambda: self._inner.step([self._inner], [Expansion(root, nodes, 1, room)])[0])

    def follow(self, transition: Transition) -> None:
        self._call("follow", lambda: self._inner.follow(transition))

    def look_up(self) -> tuple[Sequence[int], float]:
        return self._call("look_up", self._inner.look_up)

    def close(self) -> None:
        self._call("close", self._inner.close)

    def _call(self, name: str, act: Callable[[], Result]) -> Result:
        fails = self._fails(name)
        if fails and not self._after:
            raise DeviceLostError(name)
        result = act()
        if fails:
            raise DeviceLostError(name)
        return result


def failing_at(number: int) -> Callable[[str], bool]:
    """True for the call with this number, counted from 0, whatever its name."""
    calls = iter(range(10_000))
    return lambda _: next(calls) == number


def tree_of(manager: RollbackManager) -> object:
    """The state that a rollback may change."""
    session = manager.session
    nodes = [(node.position, node.token_id, node.number, node.computed) for node in session.tree.root.below()]
    return session.committed, session.epoch, nodes


def paths(root: Node) -> list[tuple[int, ...]]:
    found = []
    for child in root.children:
        found += [(child.token_id, *path) for path in ((), *paths(child))]
    return found


def manager_of(kind: str, drafter: Drafter) -> RollbackManager:
    manager = RollbackManager(OPENINGS[kind], drafter)
    manager.open()
    for _ in range(4):
        draft_step([manager])
    return manager


def contradiction(manager: RollbackManager) -> Verdict:
    """A verdict of the first token of the likeliest path and a token that is not in the tree."""
    first = manager.session.tree.root.children[0]
    other = next(token for token in range(VOCAB_SIZE) if first.child(token) is None)
    return Verdict(1, 1, 0, manager.session.base, (first.token_id, other))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("number", range(0, 40, 3))
def test_a_drafter_that_fails_at_any_call_never_disagrees_with_its_session(kind: str, number: int, after: bool) -> None:
    """The manager recovers from a failure in a verdict; any other surfaces, and session and drafter still agree."""
    rng, failed_in = random.Random(number), ""
    drafter = BrittleDrafter(DRAFTERS[kind](), failing_at(number), after=after)
    manager = RollbackManager(OPENINGS[kind], drafter)
    try:
        manager.open()
    except DeviceLostError:
        assert number < 2
        return
    committed = list(PROMPT)
    for _ in range(30):
        before = tree_of(manager)
        try:
            if rng.random() < 0.6:
                draft_step([manager])
            else:
                known = paths(manager.session.tree.root)
                new = rng.choice(known) if known and rng.random() < 0.7 else (rng.randrange(VOCAB_SIZE),)
                committed += new
                manager.apply(Verdict(1, 1, 0, manager.session.base, new))
                assert list(manager.session.committed) == committed
        except DeviceLostError as error:
            failed_in = str(error)
            break
        manager.session.offer()
        assert drafter.length == manager.session.base
    if failed_in:
        assert failed_in in ("expand", "look_up")
        assert failed_in == "look_up" or tree_of(manager) == before
        return
    while manager.session.tree.has_work:
        draft_step([manager])
    if kind == "chain":
        fresh = ModelDrafter(target_model())
        fresh.open(committed, 100)
        path = tuple(node.token_id for node in manager.session.tree.root.below())
        assert path == propose(fresh, len(path))


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_drafter_that_cannot_follow_is_opened_again_with_what_the_verdict_commits(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager = manager_of(kind, BrittleDrafter(DRAFTERS[kind](), lambda name: name == "follow"))
    verdict = contradiction(manager)
    num_nodes = manager.session.tree.num_nodes
    with caplog.at_level(logging.DEBUG):
        transition = manager.apply(verdict)
    assert transition is not None
    assert transition.num_discarded == num_nodes - 1
    assert manager.session.committed == (*PROMPT, *verdict.token_ids)
    assert manager.drafter.length == manager.session.base
    assert "opened again: DeviceLostError('follow')" in caplog.text
    assert "raise DeviceLostError" in caplog.text, "a traceback for who looks for the cause"
    assert draft_step([manager])[0][0]


def test_a_chain_whose_drafter_kept_what_was_contradicted_is_opened_again(caplog: pytest.LogCaptureFixture) -> None:
    class Forgetful(BrittleDrafter):
        def follow(self, transition: Transition) -> None:
            """Do nothing, without an error."""

    manager = manager_of("chain", Forgetful(DRAFTERS["chain"](), lambda _: False))
    verdict = contradiction(manager)
    with caplog.at_level(logging.WARNING):
        manager.apply(verdict)
    committed = len(PROMPT) + len(verdict.token_ids)
    assert manager.session.base == manager.drafter.length == committed
    assert f"drafter holds {len(PROMPT)} tokens, session {committed}" in caplog.text


# The text of a chain grows in place

NUM_TOKENS, MAX_LENGTH = 100_000, 100_100
MODEL = TableModel(VOCAB_SIZE, seed=3, max_length=MAX_LENGTH)
LONG_PROMPT = tuple(position * position % 47 for position in range(NUM_TOKENS))
CHAINS: dict[str, Callable[[], Drafter]] = {
    "model": lambda: ModelDrafter(MODEL),
    "lookup": lambda: ModelDrafter(MODEL, NgramCache(4)),
    "cascade": lambda: CascadeDrafter(MODEL, NgramDrafter(1)),
}


@pytest.mark.parametrize("kind", CHAINS)
def test_neither_a_step_nor_a_verdict_copies_the_text(kind: str) -> None:
    manager = RollbackManager(Open(1, 1, LONG_PROMPT, MAX_LENGTH, "test", 8, 1), CHAINS[kind]())
    manager.open()
    for number in range(6):
        if number == 2:  # the lists have grown
            tracemalloc.start()
        draft_step([manager])
        (likeliest,) = manager.session.tree.root.children
        manager.apply(Verdict(1, 1, 0, manager.session.base, (likeliest.token_id, 48)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < NUM_TOKENS, "a list of the text has eight bytes a token"
