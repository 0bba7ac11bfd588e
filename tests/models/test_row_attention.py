"""Attention of a few rows over many keys: the torch operator, and the Triton kernels in their interpreter.

Triton runs in a child process (`TritonProcess`): whether kernels are interpreted is decided when it is imported.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from amusd.models.attention import Window
from amusd.models.fused import add_and_norm, rotate_and_store, silu_and_multiply
from amusd.models.row_attention import attend_rows
from tests.models.attention_cases import Attend, Inputs, Shape, check, lay_out, random_tokens
from tests.models.triton_process import TritonProcess


@pytest.fixture(params=["torch", "triton"])
def attend(request: pytest.FixtureRequest) -> Attend:
    if request.param == "torch":
        return lambda inputs: attend_rows(*inputs)
    process: TritonProcess = request.getfixturevalue("interpreter")
    return process.attend


@pytest.mark.parametrize(
    ("shape", "lengths", "num_nodes", "tree", "window"),
    [
        pytest.param(Shape(2, 2), (1, 130), 3, False, None, id="chains, a head for each"),
        pytest.param(Shape(6, 2, 24), (1, 126), 3, True, None, id="trees, three heads of 24 numbers in a group"),
        pytest.param(Shape(16, 1), (20,), 5, True, None, id="a tree in tiles of four rows"),
        pytest.param(Shape(1, 1), (1300,), 2, True, None, id="a tree after many splits"),
        pytest.param(Shape(4, 1, 16, torch.bfloat16), (126,), 3, True, None, id="half precision"),
        pytest.param(Shape(2, 2), (1, 130), 3, False, Window(66), id="chains whose windows end in another block"),
        pytest.param(Shape(4, 2), (64, 190), 4, True, Window(2), id="trees, windows of two"),
        pytest.param(Shape(1, 1), (1500,), 2, True, Window(300), id="a window over splits"),
        pytest.param(Shape(2, 1), (126, 5), 5, True, Window(64, is_chunk=True), id="trees at the end of a chunk"),
    ],
)
def test_a_row_has_the_bits_that_it_has_alone(
    attend: Attend, shape: Shape, lengths: tuple[int, ...], num_nodes: int, tree: bool, window: Window | None
) -> None:
    rng = random.Random(f"{lengths} {tree}")
    found = [random_tokens(rng, shape, length, num_nodes, tree=tree) for length in lengths]
    tolerance = 1e-6 if shape.dtype is torch.float32 else 2e-2
    check(attend, found, rng, chain=not tree, spare=70, tolerance=tolerance, window=window)


def explicit(inputs: Inputs, softcap: float, sinks: Tensor, size: int) -> Tensor:
    """Attention of a chain, from the definition; `sinks` [heads], `size` of its window."""
    query, keys, values, table, _, _, _, positions, scaling = inputs
    result = torch.zeros_like(query)
    for row, position in enumerate(positions[0].tolist()):
        slots = table[0, max(0, position + 1 - size) : position + 1]
        for head in range(query.shape[2] if position >= 0 else 0):
            key_head = head * keys.shape[0] // query.shape[2]
            scores = keys[key_head, slots] @ query[0, row, head] * scaling
            scores = torch.cat((softcap * torch.tanh(scores / softcap), sinks[head : head + 1]))
            result[0, row, head] = scores.softmax(0)[:-1] @ values[key_head, slots]
    return result


def test_scores_can_be_bounded_and_sinks_take_their_share(interpreter: TritonProcess) -> None:
    rng = random.Random(7)
    inputs, placed = lay_out([random_tokens(rng, Shape(4, 2), 70, 3, tree=False)], rng, chain=True, spare=2)
    inputs = (inputs[0] * 4, *inputs[1:])
    sinks = torch.tensor([-1.0, 0.5, 2.0, 6.0])
    assert None in placed[0]
    for firsts, size in ((None, 100), (Window(5).first(inputs[7]), 5)):
        wanted, given = explicit(inputs, 1.5, sinks, size), (*inputs, 1.5, sinks, firsts)
        for found in (attend_rows(*given), interpreter.attend(given)):
            torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)


# Element-wise work of a layer: Triton's kernels against torch's

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


def check_fused_kernels() -> None:
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
    interpreter.call(check_fused_kernels)
