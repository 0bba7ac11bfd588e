"""Element-wise work of a layer: Triton's kernels against torch's, which `test_decoder.py` holds to transformers."""

from __future__ import annotations

import pytest
import torch

from amusd.models.fused import add_and_norm, rotate_and_store, silu_and_multiply
from tests.models.triton_process import TritonProcess

pytest.importorskip("triton", reason="there is no Triton for this platform")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.04}


def check_rotation(rows: int, queries: int, keys: int, dim: int, *, has_norm: bool, dtype: torch.dtype) -> None:
    """In Triton's interpreter."""
    from amusd.models import fused_triton

    generator = torch.Generator().manual_seed(rows + dim)
    joint = torch.randn((rows, queries + 2 * keys, dim), generator=generator).to(dtype)
    rotation = torch.polar(torch.ones(rows, dim // 2), torch.randn((rows, dim // 2), generator=generator))
    norm = torch.rand((queries + keys, dim), generator=generator) if has_norm else None
    slots = torch.randperm(40, generator=generator)[:rows]
    stored = [torch.full((2 * keys, 40, dim), 7.0, dtype=dtype) for _ in range(3)]
    expected = rotate_and_store(joint, rotation, norm, stored[0], slots, queries, 1e-5)
    found = fused_triton.rotate_and_store(joint, rotation, norm, stored[1], slots, queries, 1e-5)
    alone = fused_triton.rotate_and_store(joint[-1:], rotation[-1:], norm, stored[2], slots[-1:], queries, 1e-5)
    for one, other in ((found, expected), (stored[1], stored[0])):
        torch.testing.assert_close(one, other, atol=TOLERANCE[dtype], rtol=0)
    assert torch.equal(alone[0], found[-1])
    assert torch.equal(stored[2][:, slots[-1]], stored[1][:, slots[-1]])
    assert int((stored[1] != 7.0).any(2).any(0).sum()) == rows, "other slots were written"


def check_sums(num_parts: int, width: int, dtype: torch.dtype) -> None:
    """In Triton's interpreter."""
    from amusd.models import fused_triton

    generator = torch.Generator().manual_seed(width)
    parts = torch.randn((num_parts, 5, width), generator=generator).to(dtype) if num_parts else None
    hidden, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((5, width), (width,)))
    sums = [hidden.clone() for _ in range(3)]
    expected = add_and_norm(sums[0], parts, weight, 1e-5)
    found = fused_triton.add_and_norm(sums[1], parts, weight, 1e-5)
    alone = fused_triton.add_and_norm(sums[2][-1:], None if parts is None else parts[:, -1:].contiguous(), weight, 1e-5)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    if dtype is torch.float32:  # the interpreter does not round to the nearest bfloat16
        assert torch.equal(sums[1], sums[0]), "sums in another order"
    torch.testing.assert_close(sums[1], sums[0], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(sums[2][-1], sums[1][-1])
    assert torch.equal(alone[0], found[-1])


def check_kernels() -> None:
    """In Triton's interpreter."""
    from amusd.models import fused_triton

    for dtype in TOLERANCE:
        check_sums(0, 576, dtype)
        check_sums(3, 576, dtype)
        check_sums(8, 1024, dtype)
    check_rotation(8, 3, 1, 64, has_norm=False, dtype=torch.float32)
    check_rotation(3, 2, 2, 96, has_norm=True, dtype=torch.bfloat16)
    for dtype, tolerance in TOLERANCE.items():
        gate_up = torch.randn((2, 2000), generator=torch.Generator().manual_seed(0)).to(dtype)
        found = fused_triton.silu_and_multiply(gate_up)
        torch.testing.assert_close(found, silu_and_multiply(gate_up), atol=tolerance, rtol=0)
        assert torch.equal(fused_triton.silu_and_multiply(gate_up[-1:])[0], found[-1])


def test_the_kernels_of_triton_compute_what_those_of_torch_do(interpreter: TritonProcess) -> None:
    interpreter.call(check_kernels)
