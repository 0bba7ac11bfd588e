"""The number of operations that a pass launches, which first shows what a change costs or gains on a GPU."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import builders
from fake_cuda.device import fake_cuda
from fake_cuda.record import Kernel, Record
from models.fake_nccl import FakeNccl
from passes import forward, prefilled

from amusd.checkpoints.loading import capture_for
from amusd.runner.process_group import MANY_ROWS, ProcessGroup

PER_PASS = {
    ("llama-8b", "amusd"): 297,
    ("llama-1b", "transformers"): 664,
}


@pytest.mark.parametrize("size", [2, 8])
def test_an_exchange_of_ranks_launches_so_many_kernels(
    size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Few rows are gathered, then added and normed at once. Many are exchanged, and the sums go to all ranks."""

    def between_products(part: Record) -> list[str]:
        names = [kernel.name for kernel in part.kernels]
        output = names.index("linear", names.index("rotate_and_store"))
        return names[output + 1 : names.index("linear", output + 1)]

    monkeypatch.setattr(ProcessGroup, "_make", lambda *_: FakeNccl())
    with fake_cuda() as gpus, closing(ProcessGroup(0, size, str(tmp_path), "nccl")) as ranks:
        ranks.form("cuda:0")
        model = builders.build("llama-70b-slice", "cuda:0", num_layers=1, ranks=ranks)
        cache = model.new_cache(512)
        forward(model, [4, 5], cache)
        with gpus.recorded() as few:
            forward(model, [4, 5], cache)
        with gpus.recorded() as many:
            model.prefill([1] * MANY_ROWS, cache)
    assert between_products(few) == ["copy_", "add_and_norm"]
    assert between_products(many) == ["copy_", "add_and_norm", "repeat", "copy_"]


@pytest.mark.parametrize(("shape", "model_impl"), PER_PASS)
def test_a_pass_launches_so_many_kernels(shape: Any, model_impl: str) -> None:
    with fake_cuda() as gpus:
        model = builders.build(shape, "cuda:0", num_layers=None, model_impl=model_impl)
        cache = prefilled(model, [1, 2, 3], 64)
        forward(model, [4, 5], cache).choose()
        with gpus.recorded() as part:
            forward(model, [4, 5], cache).choose()
    assert len(part.replays) == 1
    assert len(part.kernels) == PER_PASS[shape, model_impl]


# Kernels of attention load masks in units of 16 bytes, and look at strides but not at the offset of the first one

ALIGNMENT = 16


def misaligned(part: Record) -> list[Kernel]:
    attention = [kernel for kernel in part.kernels if kernel.name == "scaled_dot_product_attention"]
    return [kernel for kernel in attention if any(operand.byte_offset % ALIGNMENT for operand in kernel.operands)]


def test_passes_that_are_not_captured_have_no_misaligned_mask() -> None:
    with fake_cuda() as gpus:
        model = builders.target("cuda:0", capture=capture_for("cuda:0", cuda_graphs=False))
        cache = model.new_cache(600)
        for length in range(1, 20):
            cache.truncate(0)
            with gpus.recorded() as part:
                model.prefill([1] * length, cache)
                forward(model, [1, 2], cache)
            assert part.kernels
            assert not misaligned(part), f"after a prompt of {length} tokens"
