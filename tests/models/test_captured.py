"""Captured passes, with the capture left out: the same work on the CPU. On a GPU: tests/gpu/test_cuda.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from models import tiny
from torch import Tensor

from amusd.drafters.autoregressive import AutoregressiveDrafter
from amusd.models import captured
from amusd.models.attention import register_attention
from amusd.models.cached_model import CachedModel
from amusd.models.captured import CapturedPasses, run_each_time
from amusd.models.huggingface import wrap_model
from amusd.models.load_options import LoadOptions
from amusd.models.numerics import Numerics
from amusd.models.self_test import measure_width_invariance

STEPS = 3
GPU_RULES = [
    pytest.param(Numerics(width=8, fixed=fixed, border=16, prefill_chunk=32, doubling=True), id=name)
    for fixed, name in ((True, "fixed"), (False, "bucketed"))
]
IMPLEMENTATIONS = ["amusd", "transformers"]


def models(numerics: Numerics, model_impl: str, output_ids: Tensor | None = None) -> tuple[CachedModel, CachedModel]:
    """The same weights twice: passes computed anew, and passes that would be captured."""
    config = tiny.tiny_config("LlamaConfig")
    plain, replayed = (
        wrap_model(
            tiny.tiny_causal_lm(config, register_attention()),
            LoadOptions(
                numerics=numerics, max_model_len=120, model_impl=model_impl, capture=capture, tokens_per_step=STEPS
            ),
            output_ids=output_ids,
        )
        for capture in (None, run_each_time)
    )
    return plain, replayed


def random_ids(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, tiny.VOCAB) for _ in range(length)]


@pytest.mark.parametrize("model_impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("numerics", GPU_RULES)
def test_captured_blocks_with_rollbacks_give_the_logits_of_plain_ones(numerics: Numerics, model_impl: str) -> None:
    plain, replayed = models(numerics, model_impl)
    caches = [model.new_cache(100) for model in (plain, replayed)]
    token_ids, rng = random_ids(100), random.Random(2)
    for model, cache in zip((plain, replayed), caches, strict=True):
        model.prefill(token_ids[:21], cache)
    while (start := caches[0].length) < 100:
        kept = rng.randint(1, min(plain.max_rows(start), 100 - start))
        wrong = rng.randint(0, min(plain.max_rows(start) - kept, 100 - start - kept))
        block = token_ids[start : start + kept] + random_ids(wrong, seed=start)
        expected, logits = (
            model.forward(block, cache).logits for model, cache in zip((plain, replayed), caches, strict=True)
        )
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        for cache in caches:
            cache.truncate(start + kept)


@pytest.mark.parametrize("numerics", GPU_RULES)
def test_several_tokens_in_one_replay_are_those_of_single_steps(numerics: Numerics) -> None:
    plain, replayed = models(numerics, "amusd")
    prompt = random_ids(11)
    caches = [model.new_cache(60) for model in (plain, replayed)]
    for model, cache in zip((plain, replayed), caches, strict=True):
        model.prefill(prompt[:-2], cache)
    pending = [prompt[-2:], prompt[-2:]]
    for num_tokens in (1, 2, 3, 4, 7, 3, 3, 1, 9):
        chosen = [
            model.extend(pending[index], cache, num_tokens)
            for index, (model, cache) in enumerate(zip((plain, replayed), caches, strict=True))
        ]
        assert chosen[0] == chosen[1]
        assert len(chosen[0]) == num_tokens
        assert caches[0].length == caches[1].length
        pending = [tokens[-1:] for tokens in chosen]


def test_a_replay_that_would_pass_the_end_of_the_cache_is_replaced_by_single_steps() -> None:
    plain, replayed = models(GPU_RULES[1].values[0], "amusd")  # type: ignore[arg-type]  # pytest's param is untyped
    prompt = random_ids(20)
    chosen = []
    for model in (plain, replayed):
        cache = model.new_cache(24)
        model.prefill(prompt[:-1], cache)
        chosen.append(model.extend(prompt[-1:], cache, 5))
        assert cache.length == 24
        with pytest.raises(ValueError, match="fit"):
            model.extend(chosen[-1][-1:], cache, 1)
    assert chosen[0] == chosen[1]


def test_a_reduced_head_chooses_token_ids_and_not_columns() -> None:
    config = tiny.tiny_config("LlamaConfig", tie_word_embeddings=False)
    chosen = []
    for capture in (None, run_each_time):
        model = tiny.tiny_causal_lm(config, register_attention())
        kept = torch.arange(5, 45)
        model.set_output_embeddings(_head_of(model, kept))
        wrapped = wrap_model(
            model,
            LoadOptions(
                numerics=Numerics(width=8, fixed=False), max_model_len=64, capture=capture, tokens_per_step=STEPS
            ),
            output_ids=kept,
        )
        cache = wrapped.new_cache(40)
        prompt = random_ids(9)
        wrapped.prefill(prompt[:-1], cache)
        columns = wrapped.forward(prompt[-1:], cache).logits.argmax(-1)
        cache.truncate(8)
        chosen.append(wrapped.extend(prompt[-1:], cache, 6))
        assert chosen[-1][0] == int(kept[columns[0]])
    assert chosen[0] == chosen[1]


def _head_of(model: Any, kept: Tensor) -> torch.nn.Linear:
    head = torch.nn.Linear(32, len(kept), bias=False)
    head.weight = torch.nn.Parameter(model.get_output_embeddings().weight.detach()[kept], requires_grad=False)
    return head


def test_a_shape_is_captured_once_and_a_prepared_cache_captures_nothing_more() -> None:
    captures: list[Callable[[], None]] = []

    def count(work: Callable[[], None]) -> Callable[[], None]:
        captures.append(work)
        return work

    numerics = Numerics(width=4, fixed=True, border=16, prefill_chunk=32, doubling=True)
    model = wrap_model(
        tiny.tiny_causal_lm(tiny.tiny_config(), register_attention()),
        LoadOptions(numerics=numerics, max_model_len=60, capture=count),
    )
    cache = model.new_cache(60)
    model.prepare(cache)
    prepared = len(captures)
    assert prepared == len(numerics.within(60).borders(60)) == 3
    assert cache.length == 0
    token_ids = random_ids(60)
    while cache.length < 60:
        start = cache.length
        model.choose(token_ids[start : start + min(3, model.max_rows(start))], cache)
    assert len(captures) == prepared


def test_trees_and_paths_of_a_prepared_cache_capture_nothing_more() -> None:
    captures: list[Callable[[], None]] = []

    def count(work: Callable[[], None]) -> Callable[[], None]:
        captures.append(work)
        return work

    model = wrap_model(
        tiny.tiny_causal_lm(tiny.tiny_config(), register_attention()),
        LoadOptions(
            numerics=Numerics(width=4, fixed=False, border=16, prefill_chunk=32, doubling=True, num_tracks=2),
            max_model_len=60,
            capture=count,
        ),
    )
    cache, tree_cache = model.new_cache(60), model.new_cache(20, spare=40)
    model.prepare(cache)
    prepared = len(captures)
    token_ids = random_ids(60)
    for length in range(1, 57):
        cache.truncate(0)
        model.prefill(token_ids[:length], cache)
        for rows in (2, 3, 4):
            model.choose_paths(token_ids[:rows], [0] * 2 if rows == 3 else list(range(rows - 1)), cache)
        model.choose_paths([5, 6, 7], [0, 0], cache)
        model.keep([0, 2], cache)
    assert len(captures) == prepared
    model.prepare_tree(tree_cache)
    prepared = len(captures)
    for num_keys in range(1, 61):
        visible = np.zeros((1, num_keys), dtype=np.bool_)
        visible[0, num_keys - 1] = True
        model.forward_tree([5], [0], [num_keys - 1], visible, tree_cache)
    assert len(captures) == prepared


def test_only_an_empty_cache_can_be_prepared() -> None:
    _, replayed = models(Numerics(width=8, fixed=True), "amusd")
    cache = replayed.new_cache(40)
    replayed.prefill([5, 6, 7], cache)
    for prepare in (replayed.prepare, replayed.prepare_tree):
        with pytest.raises(ValueError, match="must be empty"):
            prepare(cache)


def test_the_rows_of_a_captured_pass_do_not_depend_on_their_block() -> None:
    _, replayed = models(Numerics(width=8, fixed=True, border=16, prefill_chunk=32, doubling=True), "amusd")
    assert measure_width_invariance(replayed, random_ids(20), 90).holds


def test_a_drafter_takes_one_replay_for_several_tokens() -> None:
    plain, replayed = models(Numerics(width=8, fixed=False, border=16, prefill_chunk=32, doubling=True), "amusd")
    drafters = [AutoregressiveDrafter(model) for model in (plain, replayed)]
    assert [drafter.tokens_per_step for drafter in drafters] == [STEPS, STEPS]
    prompt = random_ids(17)
    for drafter in drafters:
        drafter.open(prompt, 90)
    for step in range(8):
        first, second = (drafter.propose(1 + step) for drafter in drafters)
        assert first == second
        for drafter in drafters:
            drafter.truncate(drafter.length - step)
            drafter.commit(random_ids(2, seed=step))


def test_a_device_that_does_not_answer_is_an_error_and_not_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class DeafEvent:
        def record(self) -> None:
            pass

        def query(self) -> bool:
            return False

    monkeypatch.setattr(captured, "DEVICE_SECONDS", 0.01)
    _, replayed = models(Numerics(width=8, fixed=False), "amusd")
    cache = replayed.new_cache(40)
    passes: CapturedPasses = cache.passes  # type: ignore[attr-defined]  # the cache of a captured model has them
    passes._done = DeafEvent()
    with pytest.raises(captured.DeviceError, match="did not finish"):
        replayed.choose([5], cache)
