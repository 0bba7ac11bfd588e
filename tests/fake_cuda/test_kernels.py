"""How many operations a pass launches: what a change of a network costs or gains on a GPU is seen here first."""

from __future__ import annotations

from typing import Any

import pytest
from fake_cuda import builders
from fake_cuda.device import fake_cuda
from fake_cuda.gpus import FakeGpus
from passes import forward

from amusd.config import ModelShape

PER_PASS = {
    ("llama-8b", "amusd"): 296,
    ("llama-1b", "transformers"): 663,
}


def num_kernels(gpus: FakeGpus, shape: ModelShape, num_layers: int | None, model_impl: str) -> int:
    model = builders.build(shape, "cuda:0", num_layers=num_layers, model_impl=model_impl)
    cache = model.new_cache(64)
    model.prefill([1, 2, 3], cache)
    forward(model, [4, 5], cache).choose()
    with gpus.recorded() as part:
        forward(model, [4, 5], cache).choose()
    assert len(part.replays) == 1
    return len(part.kernels)


@pytest.mark.parametrize(("shape", "model_impl"), PER_PASS)
def test_a_pass_launches_so_many_kernels(shape: Any, model_impl: str) -> None:
    with fake_cuda() as gpus:
        assert num_kernels(gpus, shape, None, model_impl) == PER_PASS[shape, model_impl]
