"""Kernels of attention load masks in units of 16 bytes, and look at strides but not at the offset of the first one."""

from __future__ import annotations

from fake_cuda import builders
from fake_cuda.device import fake_cuda
from fake_cuda.record import Kernel, Record
from passes import forward

from amusd.checkpoints.loading import capture_for

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
            assert not misaligned(part), f"behind a prompt of {length} tokens"
