"""Passes over several sequences: each has the bits, or the tokens, that it has alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import tiny
from models.blocks import Second, random_ids
from models.paths import random_paths
from models.tiny import wrap_model
from passes import forward
from torch import Tensor

from amusd.models.attention import register_attention
from amusd.models.kv_cache import KVCache
from amusd.models.numerics import Numerics
from amusd.models.passes import Rows
from amusd.runner.eager import EagerPasses
from amusd.runner.graphs import run_each_time
from amusd.runner.load_options import LoadOptions
from amusd.runner.model_runner import ModelRunner, extend
from amusd.runner.row_counts import RowCounts
from amusd.runner.self_test import measure_width_invariance

WIDTH = 8
FIXED = Numerics(width=WIDTH, fixed=True, prefill_chunk=64, num_tracks=3)
BUCKETED = Numerics(width=WIDTH, fixed=False, prefill_chunk=64)
REPLAYED = {
    "fixed": Numerics(width=WIDTH, fixed=True, has_borders=False, prefill_chunk=64, num_tracks=3),
    "bucketed": Numerics(width=WIDTH, fixed=False, has_borders=False, prefill_chunk=64, num_tracks=3),
}
STEPS = 3
CAPACITY = 140


def tiny_model(
    numerics: Numerics, *, replayed: bool = False, impl: str = "amusd", dtype: str = "float32"
) -> ModelRunner:
    options = LoadOptions(
        numerics=numerics,
        max_model_len=tiny.MAX_LENGTH,
        model_impl=impl,
        capture=run_each_time if replayed else None,
        tokens_per_step=STEPS if replayed else 1,
        dtype=dtype,
    )
    lm = tiny.tiny_causal_lm(tiny.tiny_config("LlamaConfig"), register_attention())
    return wrap_model(lm.to(getattr(torch, dtype)), options)


MODELS = {
    "float32": tiny_model(FIXED),
    "bfloat16": tiny_model(FIXED, dtype="bfloat16"),
    "transformers": tiny_model(FIXED, impl="transformers"),
    "replayed": tiny_model(REPLAYED["fixed"], replayed=True),
}


@dataclass
class Twin:
    token_ids: list[int]
    cache: KVCache
    alone: KVCache


def begin(model: ModelRunner, rng: random.Random, number: int) -> list[Twin]:
    caches = model.new_caches(number, CAPACITY)
    sequences = []
    for index in range(number):
        token_ids = random_ids(CAPACITY, seed=rng.randrange(10**6))
        sequences.append(Twin(token_ids, caches[index], model.new_cache(CAPACITY)))
        start = rng.randint(1, CAPACITY // 2)
        model.prefill(token_ids[:start], caches[index])
        model.prefill(token_ids[:start], sequences[-1].alone)
    return sequences


@dataclass
class Block:
    sequence: Twin
    token_ids: list[int]
    parents: list[int] | None
    kept: list[int]

    def rows(self, cache: KVCache) -> Rows:
        return Rows(self.token_ids, cache, parents=self.parents)

    def commit(self, model: ModelRunner, cache: KVCache, start: int) -> None:
        if self.parents is None:
            cache.truncate(start + len(self.kept))
        else:
            model.keep(self.kept, cache)


def random_block(model: ModelRunner, rng: random.Random, sequence: Twin) -> Block:
    start = sequence.cache.length
    rest = sequence.token_ids[start:]
    max_rows = min(model.numerics.max_rows(start), len(rest))
    if model.numerics.tracks_at(start) > 1 and max_rows > 1 and rng.random() < 0.4:
        paths = random_paths(rng, rest, max_rows, model.numerics.tracks_at(start), model.numerics.width)
        return Block(sequence, paths.token_ids, paths.parents, paths.right)
    num_right = rng.randint(1, max_rows)
    wrong = [rng.randrange(tiny.VOCAB) for _ in range(rng.randint(0, max_rows - num_right))]
    return Block(sequence, rest[:num_right] + wrong, None, list(range(num_right)))


def check_batches(model: ModelRunner, seed: int, number: int, num_passes: int = 6) -> None:
    """Random blocks and paths of random sequences in random order, and the same of each sequence alone."""
    rng = random.Random(seed)
    sequences = begin(model, rng, number)
    for _ in range(num_passes):
        going = [sequence for sequence in sequences if sequence.cache.length < len(sequence.token_ids)]
        members = rng.sample(going, rng.randint(min(1, len(going)), len(going)))
        blocks = [random_block(model, rng, sequence) for sequence in members]
        starts = [block.sequence.cache.length for block in blocks]
        together = model.run([block.rows(block.sequence.cache) for block in blocks])
        logits = [output.logits.clone() for output in together]
        for block, start, found, output in zip(blocks, starts, logits, together, strict=True):
            alone = block.sequence.alone
            expected = forward(model, block.token_ids, alone, parents=block.parents)
            assert torch.equal(found, expected.logits)
            assert output.columns is None or (output.columns == expected.columns).all()
            block.commit(model, block.sequence.cache, start)
            block.commit(model, alone, start)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=6)
@given(seed=st.integers(0, 2**32 - 1), number=st.integers(1, 6))
def test_each_sequence_of_a_batch_has_the_bits_that_it_has_alone(name: str, seed: int, number: int) -> None:
    check_batches(MODELS[name], seed, number)


def test_numbers_of_rows_agree_if_they_give_the_bits_of_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(FIXED)
    network = model._eager._network

    class Moody:
        num_ids, cache_dtype = network.num_ids, network.cache_dtype
        attention_shape = None

        def __call__(self, token_ids: Tensor, positions: Tensor, *args: object, with_logits: bool) -> Tensor:
            logits = torch.stack((token_ids, positions), 1).double()
            if len(token_ids) in (4, 16):
                logits[-1] += 1e-9  # one place alone
            return logits + (1e-9 if len(token_ids) == 32 else 0)

    counts = RowCounts(Moody(), WIDTH, 100, only_width=False)  # type: ignore[arg-type]  # as much as is needed
    assert counts.up_to(64) == [8, 24, 48, 64]
    assert [counts.quickest(rows) for rows in (1, 8, 9, 25)] == [8, 8, 24, 48]
    only = RowCounts(Moody(), WIDTH, 100, only_width=True)  # type: ignore[arg-type]  # the same
    assert only.up_to(64) == [8]
    Moody.attention_shape = (1, 1, 32)
    even = RowCounts(Moody(), WIDTH, 100, only_width=False)  # type: ignore[arg-type]  # the same
    assert even.up_to(8) == [2, 6, 8]
    monkeypatch.setattr(even, "_time", {2: 3.0, 6: 1.0, 8: 2.0}.get)
    assert [even.quickest(rows) for rows in (1, 2, 3, 7, 8, 9)] == [6, 6, 6, 8, 8, 24]


KINDS = {"computed anew": (BUCKETED, False), **{name: (rule, True) for name, rule in REPLAYED.items()}}


@pytest.mark.parametrize("name", ["float32", "replayed"])
def test_a_prompt_that_is_taken_in_beside_passes_of_others_has_the_bits_of_one_that_is_alone(name: str) -> None:
    model, (token_ids, other) = MODELS[name], (random_ids(CAPACITY, seed=seed) for seed in (1, 2))
    (beside, busy), alone = model.new_caches(2, CAPACITY + 1), model.new_cache(CAPACITY + 1)
    model.prefill(token_ids, alone)
    for start in range(0, CAPACITY, model.numerics.prefill_chunk):
        model.prefill(token_ids[start : start + model.numerics.prefill_chunk], beside)
        model.run([Rows(other[start : start + 3], busy)])
    found, _ = model.run([Rows([5], beside), Rows([6], busy)])
    logits = found.logits.clone()
    assert torch.equal(logits, forward(model, [5], alone).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_chains_of_several_sequences_go_on_as_each_does_alone(kind: str) -> None:
    model = tiny_model(KINDS[kind][0], replayed=KINDS[kind][1])
    caches, alone = model.new_caches(4, 60), [model.new_cache(60) for _ in range(4)]
    for index, pair in enumerate(zip(caches, alone, strict=True)):
        for cache in pair:
            model.prefill(random_ids(5 + 7 * index, seed=index), cache)
    pending = [random_ids(1 + index, seed=index) for index in range(4)]
    for number, steps in ((4, model.tokens_per_step), (3, 1), (1, model.tokens_per_step), (2, model.tokens_per_step)):
        outputs = model.run([Rows(pending[index], caches[index]) for index in reversed(range(number))], steps)
        found = [output.choose()[-steps:] for output in reversed(outputs)]
        for index in range(number):
            assert found[index] == extend(model, pending[index], alone[index], steps)
            assert caches[index].length == alone[index].length
            pending[index] = found[index][-1:]


@pytest.mark.parametrize("rule", REPLAYED)
def test_sequences_that_want_other_samplers_share_a_pass(rule: str) -> None:
    model = tiny_model(REPLAYED[rule], replayed=True)
    caches, low, high, steps = model.new_caches(4, 60), Second(0), Second(1), model.tokens_per_step
    samplers = [low, None, high, low]
    batch, expected = [], []
    for index, (cache, sampler) in enumerate(zip(caches, samplers, strict=True)):
        model.prefill(random_ids(5 + index, seed=index), cache)
        batch.append(Rows([3, 4], cache, None if sampler is None else sampler.wanted(1 + steps)))
        expected.append(model.run(batch[-1:], steps)[0].choose())
        cache.truncate(5 + index)
    for output, sampler, columns in zip(model.run(batch, steps), samplers, expected, strict=True):
        assert output.choose() == columns
        assert (output.outputs == (7 if sampler is high else 5)).all(), "neutral where a row wants less"


@pytest.mark.parametrize("replayed", [False, True])
def test_the_self_test_looks_at_neighbours(replayed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(REPLAYED["fixed"] if replayed else FIXED, replayed=replayed)
    assert not any(measure_width_invariance(model, random_ids(20), 30))
    if not replayed:
        compute = EagerPasses._compute

        def spoilt(self: EagerPasses, parts: Sequence[object], *, with_logits: bool) -> Tensor:
            logits = compute(self, parts, with_logits=with_logits)  # type: ignore[arg-type]  # as it is
            return logits if len(parts) == 1 else logits + 1

        monkeypatch.setattr(EagerPasses, "_compute", spoilt)
        assert any(measure_width_invariance(model, random_ids(20), 30))
