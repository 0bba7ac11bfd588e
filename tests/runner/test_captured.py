"""Captured passes, with the capture left out: the same work on the CPU. On a GPU: tests/gpu/test_cuda.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import tiny
from models.blocks import random_ids
from passes import forward, prefilled

from amusd.errors import DeviceError, NotFiniteError
from amusd.models.kv_cache import KVCache
from amusd.models.numerics import Numerics
from amusd.models.passes import Rows
from amusd.models.sharding import Ranks
from amusd.runner.graphs import Capture, run_each_time
from amusd.runner.model_runner import ModelRunner, extend
from amusd.runtime.ranks import command_encoder, follow

STEPS = 3


def wrapped(numerics: Numerics, capture: Capture | None = run_each_time, model_impl: str = "amusd") -> ModelRunner:
    """A model whose passes would be captured; the same weights each time."""
    _, model = tiny.wrapped_pair("LlamaConfig", numerics, capture=capture, model_impl=model_impl, tokens_per_step=STEPS)
    return model


def test_a_prompt_goes_on_behind_rows_of_paths_on_every_rank() -> None:
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
