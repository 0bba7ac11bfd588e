"""Element-wise work of a layer in one kernel: Triton's against torch's, and what a decoder does with either."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

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


@pytest.mark.parametrize("has_norm", [False, True])
def test_rotation_and_storing_are_those_of_transformers(has_norm: bool) -> None:
    rows, queries, keys, dim = 3, 4, 2, 8
    halves = torch.randn(rows, queries + 2 * keys, dim)
    weights = torch.rand(dim)
    angles = torch.randn(rows, dim // 2)
    neighbours = torch.arange(dim).view(2, dim // 2).t().reshape(dim)
    norm = weights[neighbours].expand(queries + keys, -1).contiguous() if has_norm else None
    joint = torch.cat((halves[:, : queries + keys, neighbours], halves[:, queries + keys :]), dim=1)
    storage = torch.zeros(2 * keys, 9, dim)
    slots = torch.tensor([5, 2, 8])
    query = rotate_and_store(joint, torch.polar(torch.ones_like(angles), angles), norm, storage, slots, queries, 1e-6)
    rotated = halves[:, : queries + keys]
    if has_norm:
        rotated = F.rms_norm(rotated, (dim,), weights, 1e-6)
    first, second = rotated.chunk(2, dim=-1)
    both = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    expected = (rotated * both.cos() + torch.cat((-second, first), dim=-1) * both.sin())[..., neighbours]
    torch.testing.assert_close(query, expected[:, :queries])
    torch.testing.assert_close(storage[:keys, slots].transpose(0, 1), expected[:, queries:])
    assert torch.equal(storage[keys:, slots].transpose(0, 1), halves[:, queries + keys :])
    assert int(storage.any(2).any(0).sum()) == rows


def test_the_activation_is_that_of_llama() -> None:
    gate, up = torch.randn(2, 5, 12).unbind()
    torch.testing.assert_close(silu_and_multiply(torch.cat((gate, up), dim=1)), F.silu(gate) * up)
