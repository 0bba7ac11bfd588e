"""The contract of a model and its caches with workers and drafters, for a real one and the tests' doubles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from models import tiny
from models.blocks import random_ids
from passes import forward, prefilled
from sampling.law import PrefixModel
from table_model import TableModel

from amusd.config import Distribution
from amusd.errors import DeviceError, NotFiniteError
from amusd.models.kv_cache import KVCache
from amusd.models.numerics import Numerics
from amusd.models.passes import Paths, Rows, SamplerRows
from amusd.models.sharding import Ranks
from amusd.runner.graphs import Capture, run_each_time
from amusd.runner.model_runner import ModelRunner, extend
from amusd.runtime.ranks import command_encoder, follow
from amusd.sampling.sampler import DRAFT_LEVELS, RowSampler, SequenceSampler

IDS, NEXT, CAPACITY, STEPS = random_ids(6), random_ids(4, seed=3), 40, 3
ON_CPU = Numerics(width=8, fixed=True, prefill_chunk=32, num_tracks=3)
ON_GPU = Numerics(width=8, fixed=True, has_borders=False, prefill_chunk=32, num_tracks=3)


def wrapped(numerics: Numerics, capture: Capture | None = run_each_time, model_impl: str = "amusd") -> ModelRunner:
    """A model whose passes would be captured; the same weights each time."""
    _, model = tiny.wrapped_pair("LlamaConfig", numerics, capture=capture, model_impl=model_impl, tokens_per_step=STEPS)
    return model


def captured() -> Any:
    return wrapped(ON_GPU)


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


def test_a_pass_after_an_interrupted_one_reads_the_slots_that_were_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def logits(*, interrupted: bool) -> torch.Tensor:
        model = captured()
        cache = prefilled(model, IDS, CAPACITY)
        forward(model, [NEXT[0], 5, NEXT[1], NEXT[2]], cache, parents=[0, 0, 2])
        model.keep([0, 2, 3], cache)
        if interrupted:
            with monkeypatch.context() as patch:
                patch.setattr(cache.captured._inputs._table, "send", Mock(side_effect=KeyboardInterrupt))
                with pytest.raises(KeyboardInterrupt):
                    forward(model, NEXT[3:], cache)
        return forward(model, NEXT[3:], cache).logits.clone()

    assert torch.equal(logits(interrupted=True), logits(interrupted=False))


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


# Captured passes, with the capture left out: the same work on the CPU. On a GPU: tests/gpu/test_cuda.py


def test_a_prompt_goes_on_after_rows_of_paths_on_every_rank() -> None:
    """Kept rows lie in slots of other positions, which a chunk of a prompt cannot do with."""
    numerics = Numerics(width=8, fixed=False, has_borders=False, prefill_chunk=32, num_tracks=3)
    plain, leading, following = wrapped(numerics, None), wrapped(numerics), wrapped(numerics)
    ids, encode, frames = random_ids(60), command_encoder(), list[bytes]()
    leading.ranks = Ranks(0, 1)
    leading.ranks.announce = lambda *command: frames.append(encode(*command))  # type: ignore[method-assign]
    cache, expected = prefilled(leading, ids[:10], 100), prefilled(plain, ids[:50], 100)
    forward(leading, [ids[10], 5, ids[11], ids[12]], cache, parents=[0, 0, 2])
    leading.keep([0, 2, 3], cache)
    cache.truncate(12)
    leading.prefill(ids[12:50], cache)
    logits = forward(leading, ids[50:52], cache).logits
    torch.testing.assert_close(logits, forward(plain, ids[50:52], expected).logits, atol=1e-4, rtol=1e-4)
    made: list[KVCache] = []
    make = following.new_caches
    following.new_caches = lambda *args, **options: made.extend(make(*args, **options)) or made  # type: ignore[assignment]
    follow(following, frames)
    for part, tensor in cache.memory._tensors.items():
        assert torch.equal(made[0].memory._tensors[part][:, :52], tensor[:, :52])


def test_padding_is_not_written_over_rows_near_the_end_of_a_cache() -> None:
    model = wrapped(Numerics(width=8, fixed=True, has_borders=False, prefill_chunk=32, num_tracks=6))
    found = []
    for capacity in (20, 60):
        _, cache = model.new_caches(2, capacity)  # the first place of a pass is the other one's
        model.prefill(random_ids(18), cache)
        found.append(forward(model, random_ids(7, seed=2), cache, parents=[0] * 6).logits)
    assert torch.equal(*found)


def test_a_pass_that_was_not_prepared_is_an_error_and_not_a_delay() -> None:
    replayed = wrapped(Numerics(width=8, fixed=True, has_borders=False))
    cache = replayed.new_cache(40)
    replayed.prepare(cache)
    with pytest.raises(DeviceError, match="was not prepared: PassShape"):
        replayed.run([Rows([5], cache)], steps=2)
    with pytest.raises(ValueError, match="4 steps: must be between 1 and 3"):
        replayed.run([Rows([5], cache)], steps=4)


def test_a_logit_that_is_no_finite_number_comes_with_the_tokens() -> None:
    numerics = Numerics(width=8, fixed=False, has_borders=False, prefill_chunk=32, num_tracks=3)
    replayed = wrapped(numerics, model_impl="transformers")
    cache = prefilled(replayed, [5, 6, 7], 40)
    assert len(forward(replayed, [8, 9], cache).choose()) == 2
    network: Any = replayed.network
    network._model.get_output_embeddings().weight.data[3].fill_(torch.nan)
    for ask in (
        lambda: forward(replayed, [8, 9], cache).choose(),
        lambda: forward(replayed, [8, 9, 10], cache, parents=[0, 0]).choose(),
        lambda: extend(replayed, [8], cache, STEPS),
    ):
        cache.truncate(3)
        with pytest.raises(NotFiniteError, match=r"^the largest logit is nan$"):
            ask()
