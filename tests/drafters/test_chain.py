"""The text of a chain grows in place."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest
from table_model import TableModel

from amusd.drafters.base import Drafter
from amusd.drafters.cascade import CascadeDrafter
from amusd.drafters.model import ModelDrafter
from amusd.drafters.ngram import NgramCache, NgramDrafter
from amusd.protocol.messages import Open, Verdict
from amusd.runtime.draft_worker import draft_step
from amusd.runtime.rollback import RollbackManager

NUM_TOKENS, MAX_LENGTH, VOCAB_SIZE = 100_000, 100_100, 50
MODEL = TableModel(VOCAB_SIZE, seed=3, max_length=MAX_LENGTH)
PROMPT = tuple(position * position % 47 for position in range(NUM_TOKENS))
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "model": lambda: ModelDrafter(MODEL),
    "lookup": lambda: ModelDrafter(MODEL, NgramCache(4)),
    "cascade": lambda: CascadeDrafter(MODEL, NgramDrafter(1)),
}


@pytest.mark.parametrize("kind", DRAFTERS)
def test_neither_a_step_nor_a_verdict_copies_the_text(kind: str) -> None:
    manager = RollbackManager(Open(1, 1, PROMPT, MAX_LENGTH, "test", 8, 1), DRAFTERS[kind]())
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
