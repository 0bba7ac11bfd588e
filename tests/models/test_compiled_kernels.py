"""Every Triton kernel compiled through its wrapper, for GPUs that are not here: it must fit, and be one for all passes.

The models are those of `conf/pair`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.models.attention_cases import Shape
from tests.models.triton_process import Kernel, TritonProcess, example

pytest.importorskip("triton", reason="there is no Triton for this platform")
SHARED_KIB = {80: 163, 89: 99, 90: 227, 120: 99}
"""Most shared memory of a program, by the GPU's capability."""
KERNELS = [*["_add_and_norm"] * 3, "_attend_splits", "_combine_splits", "_kernel", "_rotate_and_store"]
KERNELS += ["_silu_and_multiply"]


@dataclass(frozen=True)
class Model:
    heads: int
    key_heads: int
    dim: int
    width: int
    inner: int
    """Columns of the MLP."""
    num_ids: int = 128_256
    has_head_norm: bool = False


MODELS = {
    "Llama-3.1-8B": Model(32, 8, 128, 4096, 14_336),
    "Llama-3.2-1B": Model(32, 8, 64, 2048, 8192),
    "Llama-3.3-70B": Model(64, 8, 128, 8192, 28_672),
    "Qwen2.5-7B": Model(28, 4, 128, 3584, 18_944, 152_064),
    "Qwen2.5-0.5B": Model(14, 2, 64, 896, 4864, 151_936),
    "Qwen3-32B": Model(64, 8, 128, 5120, 25_600, 151_936, has_head_norm=True),
    "Qwen3-8B": Model(32, 8, 128, 4096, 12_288, 151_936, has_head_norm=True),
    "Qwen3-0.6B": Model(16, 8, 128, 1024, 3072, 151_936, has_head_norm=True),
}
LARGE = [Shape(16, 2, 256, torch.bfloat16), Shape(16, 2, 128), Shape(16, 8, 64)]
"""Tiles that fit only without copies ahead of the products; not of `conf/pair`."""
WINDOWED = [Shape(heads, keys, dim, torch.bfloat16) for heads, keys, dim in ((32, 16, 128), (4, 1, 256), (64, 8, 64))]
"""Gemma 3 27B and 1B, and gpt-oss 20B, whose other layers transformers computes."""


def attend(
    shape: Shape,
    *,
    rows: int = 8,
    width: int = 2048,
    paths: int = 3,
    seqs: int = 1,
    moved: bool = False,
    windowed: bool = False,
) -> None:
    """`moved`: tables and positions begin at addresses that are multiples of 8 only."""
    from amusd.models.row_attention_triton import attend_rows

    inputs = example(shape, seqs=seqs, rows=rows, width=width, paths=paths)
    indices = [_unaligned(each) if moved else each for each in inputs[3:8]]
    attend_rows(*inputs[:3], *indices, inputs[8], 0.0, None, indices[-1] if windowed else None)


def _unaligned(indices: Tensor) -> Tensor:
    whole = torch.zeros(indices.numel() + 2, dtype=indices.dtype)
    first = 1 if whole.data_ptr() % 16 == 0 else 0
    return whole[first : first + indices.numel()].view(indices.shape)


def attend_in_several_passes(*, windowed: bool) -> None:
    shape = Shape(64, 8, 128, torch.bfloat16)
    attend(shape, rows=1, width=256, paths=0, windowed=windowed)
    attend(shape, moved=True, windowed=windowed)
    attend(shape, seqs=8, rows=16, width=131_072, paths=16, windowed=windowed)


def attend_in_large_tiles() -> None:
    for shape in (*LARGE, *WINDOWED, Shape(2, 2, 256, torch.float32)):  # the last one is torch's
        attend(shape, windowed=True)


def launch_all(model: Model) -> None:
    """Every kernel of a model, in passes of several numbers of rows; sums of one, two and eight ranks."""
    from amusd.models.fused_triton import add_and_norm, rotate_and_store, silu_and_multiply
    from amusd.sampling.noise_triton import noisy_scores

    dtype, dim = torch.bfloat16, model.dim
    num_rotated, num_stored = model.heads + model.key_heads, 2 * model.key_heads
    norm = torch.ones(num_rotated, dim) if model.has_head_norm else None
    storage, weight = torch.zeros((num_stored, 64, dim), dtype=dtype), torch.ones(model.width, dtype=dtype)
    for rows in (1, 8, 16):
        attend(Shape(model.heads, model.key_heads, dim, dtype), rows=rows)
        joint, turns = torch.zeros((rows, model.heads + num_stored, dim), dtype=dtype), torch.zeros(rows, dim // 2)
        slots = torch.zeros(rows, dtype=torch.int64)
        rotate_and_store(joint, turns.to(torch.complex64), norm, storage, slots, model.heads, 1e-6)
        silu_and_multiply(torch.zeros((rows, 2 * model.inner), dtype=dtype))
        for parts in (None, *(torch.zeros((ranks, rows, model.width), dtype=dtype) for ranks in (2, 8))):
            add_and_norm(torch.zeros((rows, model.width), dtype=dtype), parts, weight, 1e-6)
        codes, packed = torch.zeros(model.num_ids, dtype=torch.int32), torch.zeros((rows, 20), dtype=torch.int64)
        noisy_scores(torch.zeros((rows, model.num_ids), dtype=dtype), codes, packed[:, 0], torch.ones(rows))


def compiled(capability: int, work: Callable[[], None]) -> list[Kernel]:
    with TritonProcess(capability) as compiler:
        kernels = sorted(compiler.compile(work), key=lambda kernel: kernel.name)
    assert all(kernel.shared_bytes <= SHARED_KIB[capability] * 1024 for kernel in kernels)
    return kernels


@pytest.mark.parametrize("windowed", [False, True])
def test_one_kernel_of_each_kind_is_compiled_for_hopper_and_fits(windowed: bool) -> None:
    kernels = compiled(90, partial(attend_in_several_passes, windowed=windowed))
    assert [kernel.name for kernel in kernels] == ["_attend_splits", "_combine_splits"]
    assert all(kernel.spilled_bytes <= 32 for kernel in kernels)  # none with triton 3.7, 4 with 3.6
    assert all(2 * kernel.shared_bytes <= 227 * 1024 for kernel in kernels)  # two programs of a multiprocessor
    assert [kernel.num_async_copies > 0 for kernel in kernels] == [True, False]


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        pytest.param(name, capability, marks=() if (name, capability) == ("Qwen2.5-7B", 89) else pytest.mark.long)
        for name, capability in itertools.product(MODELS, SHARED_KIB)
    ],
)
def test_the_kernels_of_a_model_fit_and_are_the_same_for_all_passes(name: str, capability: int) -> None:
    kernels = compiled(capability, partial(launch_all, MODELS[name]))
    assert [kernel.name for kernel in kernels] == KERNELS
    assert all(kernel.spilled_bytes <= 128 for kernel in kernels)


@pytest.mark.long
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_large_tiles_fit_too(capability: int) -> None:
    assert len(compiled(capability, attend_in_large_tiles)) == 2 * len(LARGE + WINDOWED)
