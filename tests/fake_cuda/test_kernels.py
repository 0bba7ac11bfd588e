"""How many operations a pass launches: what a change of a network costs or gains on a GPU is seen here first."""

from __future__ import annotations

from typing import Any

import pytest
from fake_cuda import builders
from fake_cuda.device import fake_cuda
from passes import forward

PER_PASS = {
    ("llama-8b", "amusd"): 296,
    ("llama-1b", "transformers"): 663,
}


@pytest.mark.parametrize(("shape", "model_impl"), PER_PASS)
def test_a_pass_launches_so_many_kernels(shape: Any, model_impl: str) -> None:
    with fake_cuda() as gpus:
        model = builders.build(shape, "cuda:0", num_layers=None, model_impl=model_impl)
        cache = model.new_cache(64)
        model.prefill([1, 2, 3], cache)
        forward(model, [4, 5], cache).choose()
        with gpus.recorded() as part:
            forward(model, [4, 5], cache).choose()
    assert len(part.replays) == 1
    assert len(part.kernels) == PER_PASS[shape, model_impl]
