"""Element-wise work of a layer in one kernel: Triton's against torch's, and what a decoder does with either."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from amusd.models.fused import rotate_and_store, silu_and_multiply
from tests.models.fused_interpreted import compare
from tests.models.triton_process import TritonProcess

pytest.importorskip("triton", reason="there is no Triton for this platform")


def test_the_kernels_of_triton_compute_what_those_of_torch_do(interpreter: TritonProcess) -> None:
    for case in interpreter.call(compare):
        assert case["error"] <= (0.04 if "bfloat16" in case["case"] else 1e-5), case
        assert case["same_alone"], f"a row depends on its neighbours: {case}"
        assert case["num_written"] == case["rows"], f"other slots were written: {case}"


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
