"""The contract suite that ships: it passes what keeps the promises, and finds each way of breaking one."""

from __future__ import annotations

import functools

import pytest
from models import tiny

from amusd.contract import check_chain_drafter, check_tree_drafter
from amusd.drafters.base import ChainDrafter
from amusd.drafters.ngram import NgramCache, NgramDrafter
from amusd.drafters.tree import ModelTreeDrafter
from amusd.models.cached_model import CachedModel
from amusd.models.numerics import Numerics
from amusd.protocol.draft_session import Transition

NUMERICS = Numerics(width=8, fixed=False, border=32, prefill_chunk=32)
VOCAB_SIZE = 12


@functools.lru_cache
def model() -> CachedModel:
    return tiny.wrapped_pair("LlamaConfig", NUMERICS)[1]


class Remembers(NgramDrafter):
    """Keeps in its index what was cut."""

    def truncate(self, length: int) -> None:
        ChainDrafter.truncate(self, length)


class Forgets(NgramDrafter):
    """Proposes, and does not take it in."""

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        return self._ngrams.continuation(max_tokens)


@pytest.mark.parametrize("broken", [Remembers, Forgets])
def test_a_broken_drafter_of_chains_is_found(broken: type[NgramDrafter]) -> None:
    with pytest.raises((AssertionError, IndexError)):
        check_chain_drafter(lambda: broken(1, 3), vocab_size=6)


class KeepsSlots(ModelTreeDrafter):
    """Joins the wrong keys to the prefix."""

    def follow(self, transition: Transition) -> None:
        super().follow(transition)
        if transition.kept:
            self._prefix[self._num_computed - 1] = 0


def test_a_drafter_of_trees_keeps_its_promise() -> None:
    check_tree_drafter(lambda: ModelTreeDrafter(model(), NgramCache(2, 4)), vocab_size=VOCAB_SIZE, num_histories=10)


def test_a_broken_drafter_of_trees_is_found() -> None:
    with pytest.raises(AssertionError):
        check_tree_drafter(lambda: KeepsSlots(model(), NgramCache(2, 4)), vocab_size=VOCAB_SIZE)
