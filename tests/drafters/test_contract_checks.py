"""The contract suite that ships: it passes what keeps the promises, and finds each way of breaking one."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
from models import tiny

from amusd.contract import check_drafter
from amusd.drafters.base import Drafter
from amusd.drafters.ngram import NgramCache, NgramDrafter
from amusd.drafters.tree import ModelTreeDrafter
from amusd.models.cached_model import CachedModel
from amusd.models.numerics import Numerics
from amusd.protocol.draft_session import Transition

NUMERICS = Numerics(width=8, fixed=False, prefill_chunk=32)
VOCAB_SIZE = 12


@functools.lru_cache
def model() -> CachedModel:
    return tiny.wrapped_pair("LlamaConfig", NUMERICS)[1]


class Remembers(NgramDrafter):
    """Takes in what it proposes."""

    def propose(self, path: Sequence[int], room: int) -> Sequence[int]:
        found = super().propose(path, room)
        self._ngrams.commit(found)
        return found


class Forgets(NgramDrafter):
    """Does not index what was committed."""

    def commit(self, token_ids: Sequence[int]) -> None:
        Drafter.commit(self, token_ids)


@pytest.mark.parametrize("broken", [Remembers, Forgets])
def test_a_broken_drafter_of_chains_is_found(broken: type[NgramDrafter]) -> None:
    with pytest.raises(AssertionError):
        check_drafter(lambda: broken(1, 3), vocab_size=6, fan_outs=[1])


class KeepsSlots(ModelTreeDrafter):
    """Joins the wrong keys to the prefix."""

    def follow(self, transition: Transition) -> None:
        super().follow(transition)
        if transition.kept:
            self._prefix[self._num_computed - 1] = 0


def test_a_drafter_over_a_model_keeps_its_promise() -> None:
    check_drafter(lambda: ModelTreeDrafter(model(), NgramCache(2, 4)), vocab_size=VOCAB_SIZE, num_histories=10)


def test_a_broken_drafter_of_trees_is_found() -> None:
    with pytest.raises(AssertionError):
        check_drafter(lambda: KeepsSlots(model(), NgramCache(2, 4)), vocab_size=VOCAB_SIZE, fan_outs=[3])
