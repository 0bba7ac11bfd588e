"""What workers and drafters may expect of a model and its caches: of a real one, and of the tests' doubles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from models import tiny
from models.blocks import random_ids
from passes import forward, prefilled
from sampling.law import PrefixModel
from table_model import TableModel

from amusd.config import Distribution
from amusd.models.numerics import Numerics
from amusd.models.passes import Paths, Rows, SamplerRows
from amusd.runner.graphs import run_each_time
from amusd.runner.model_runner import extend
from amusd.sampling.sampler import DRAFT_LEVELS, RowSampler, SequenceSampler

IDS, NEXT, CAPACITY, STEPS = random_ids(6), random_ids(4, seed=3), 40, 3
ON_CPU = Numerics(width=8, fixed=True, prefill_chunk=32, num_tracks=3)
ON_GPU = Numerics(width=8, fixed=True, has_borders=False, prefill_chunk=32, num_tracks=3)


def captured() -> Any:
    return tiny.wrapped_pair("LlamaConfig", ON_GPU, capture=run_each_time, tokens_per_step=STEPS)[1]


MAKE: dict[str, Callable[[], Any]] = {
    "eager": lambda: tiny.wrapped_pair("LlamaConfig", ON_CPU)[1],
    "captured": captured,
    "table": lambda: TableModel(tiny.VOCAB, max_length=tiny.MAX_LENGTH, numerics=ON_GPU),
}
WITH_PATHS = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


@pytest.mark.parametrize("make", [*MAKE.values(), lambda: PrefixModel(1, tiny.VOCAB)], ids=[*MAKE, "prefix"])
def test_a_block_chooses_what_single_tokens_choose_after_a_rollback_too(make: Callable[[], Any]) -> None:
    model = make()
    cache = prefilled(model, IDS, CAPACITY)
    expected = [forward(model, [token_id], cache).choose()[0] for token_id in NEXT]
    assert len(set(expected)) == len(NEXT), "a model that is too simple"
    cache.truncate(len(IDS) + 1)
    forward(model, [NEXT[0], NEXT[0]], cache)
    cache.truncate(len(IDS))
    assert forward(model, NEXT, cache).choose() == expected
    assert cache.length == len(IDS + NEXT)


@WITH_PATHS
def test_rows_of_a_path_and_of_a_tree_choose_what_a_chain_chooses(make: Callable[[], Any]) -> None:
    model = make()
    cache = prefilled(model, IDS, CAPACITY)
    expected = forward(model, NEXT, cache).choose()
    cache.truncate(len(IDS))
    rows = forward(model, [NEXT[0], 5, NEXT[1], NEXT[2]], cache, parents=[0, 0, 2]).choose()
    assert [rows[row] for row in (0, 2, 3)] == expected[:3]
    assert cache.length == len(IDS)
    model.keep([0, 2, 3], cache)
    assert cache.length == len(IDS) + 3
    assert forward(model, NEXT[3:], cache).choose() == expected[3:]
    tree_cache = model.new_cache(CAPACITY, spare=16)
    model.prefill(IDS, tree_cache)
    paths = Paths(np.arange(len(IDS)), [[40], [42], [40, 41]])
    [output] = model.run([Rows([NEXT[0], 5, NEXT[1]], tree_cache, paths=paths)])
    assert [output.choose()[row] for row in (0, 2)] == expected[:2]


@WITH_PATHS
def test_what_does_not_fit_is_refused_and_changes_nothing(make: Callable[[], Any]) -> None:
    model = make()
    for capacity in (0, tiny.MAX_LENGTH + 1):
        with pytest.raises(ValueError, match=f"a cache of {capacity} tokens: must be between 1 and 256"):
            model.new_caches(1, capacity)
    cache = prefilled(model, IDS, len(IDS) + 3)
    for token_ids, parents in (([5] * 9, None), ([5] * 4, None), ([5] * 9, [0] * 8), ([5] * 5, [0] * 4)):
        with pytest.raises(ValueError, match=r"\d"):
            forward(model, token_ids, cache, parents=parents)
        assert cache.length == len(IDS)
    with pytest.raises(ValueError, match="truncate a cache of length 6 to 7"):
        cache.truncate(7)


@pytest.mark.parametrize("make", [captured, MAKE["table"]], ids=["captured", "table"])
def test_further_steps_take_in_the_tokens_chosen_before(make: Callable[[], Any]) -> None:
    model = make()
    cache = prefilled(model, IDS, CAPACITY)
    [output] = model.run([Rows(NEXT[:2], cache)], steps=STEPS)
    assert cache.length == len(IDS) + 2 + STEPS - 1
    cache.truncate(len(IDS))
    model.tokens_per_step = 1
    assert output.choose()[1:] == extend(model, NEXT[:2], cache, STEPS)


@WITH_PATHS
def test_sequences_of_a_memory_have_biases_of_their_own(make: Callable[[], Any]) -> None:
    model, batch = make(), []
    for favourite, cache in zip((7, 8, 9), model.new_caches(3, CAPACITY), strict=True):
        state, number = model.sampling_state(cache)
        model.prepare(cache, [RowSampler(state, level) for level in DRAFT_LEVELS])
        sampler = SequenceSampler(Distribution(logit_bias=((favourite, 90.0),)), state, sequence=number)
        model.prefill(IDS, cache)
        batch.append(Rows(NEXT[:1], cache, SamplerRows(sampler.sampler, sampler.inputs(len(IDS), NEXT[:1]))))
    assert [output.choose() for output in model.run(batch)] == [[7], [8], [9]]
