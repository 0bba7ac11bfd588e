"""Packed products: the same numbers as plain ones, for any shape, and for any row wherever it stands.

Also those whose weights are packed in float16, which holds what comes in bfloat16.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from amusd.errors import ConfigError
from amusd.models.linear import (
    FbgemmLinear,
    PackedLinear,
    PlainLinear,
    Weights,
    _num_even_rows,
    can_pack,
    make_linear,
    multiplies_fp16,
)

SHAPES = [(1, 1), (31, 200), (97, 33), (577, 576)]
"""[out, in]"""
ROWS = [1, 8, 9, 33]
EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}
CPU = torch.device("cpu")
DTYPES = [
    pytest.param(
        dtype,
        id=str(dtype),
        marks=pytest.mark.skipif(not can_pack(CPU, dtype), reason=f"this build of torch packs no {dtype}"),
    )
    for dtype in EPSILON
]
HAS_FP16 = pytest.mark.skipif(not multiplies_fp16(CPU, torch.float32), reason="no products with weights in float16")
KINDS = [
    *(pytest.param(PackedLinear, *dtype.values, id=str(dtype.id), marks=dtype.marks) for dtype in DTYPES),
    pytest.param(FbgemmLinear, torch.float32, id="weights in float16", marks=HAS_FP16),
]


def random_tensor(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(shape: tuple[int, int], dtype: torch.dtype, *, has_bias: bool) -> tuple[Tensor, Tensor | None]:
    weight = random_tensor(*shape, seed=1, dtype=torch.bfloat16).to(dtype)
    return weight, random_tensor(shape[0], seed=2, dtype=dtype) if has_bias else None


def assert_within_rounding(result: Tensor, exact: Tensor, magnitude: Tensor) -> None:
    """`magnitude`: the sum of the absolute values of what was added up; one rounding of the result on top."""
    assert result.shape == exact.shape
    epsilon = EPSILON[result.dtype]
    allowed = epsilon * exact.abs() + 64 * EPSILON[torch.float32] * magnitude
    assert ((result.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_a_packed_product_is_the_plain_one_within_rounding_and_a_sum_is_rounded_once(
    kind: type[PackedLinear | FbgemmLinear], dtype: torch.dtype, shape: tuple[int, int], has_bias: bool
) -> None:
    weight, bias = layer(shape, dtype, has_bias=has_bias)
    packed, plain = kind(weight, bias), PlainLinear(weight, bias)
    offset = torch.zeros(shape[0]).double() if bias is None else bias.double()
    for num_rows in ROWS:
        rows = random_tensor(num_rows, shape[1], seed=num_rows, dtype=dtype)
        exact = rows.double() @ weight.double().t() + offset
        magnitude = rows.double().abs() @ weight.double().abs().t() + offset.abs()
        for linear in (packed, plain):
            assert_within_rounding(linear(rows), exact, magnitude)
        residual = random_tensor(num_rows, shape[0], seed=4, dtype=dtype)
        before = residual.clone()
        total, largest = residual.double() + exact, residual.double().abs() + magnitude
        assert_within_rounding(packed.add_to(residual, rows), total, largest)
        assert torch.equal(residual, before)


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@settings(max_examples=25)
@given(data=st.data())
def test_at_a_fixed_number_of_rows_a_result_depends_neither_on_its_place_nor_on_its_neighbours(
    kind: type[PackedLinear | FbgemmLinear], dtype: torch.dtype, data: st.DataObject
) -> None:
    shape = data.draw(st.sampled_from(SHAPES))
    num_rows = data.draw(st.integers(2, 40))
    linear = kind(*layer(shape, dtype, has_bias=data.draw(st.booleans())))
    place, other_place = (data.draw(st.integers(0, num_rows - 1)) for _ in range(2))
    row, residual_row = random_tensor(shape[1], seed=5, dtype=dtype), random_tensor(shape[0], seed=6, dtype=dtype)
    results = []
    for seed, where in ((7, place), (8, other_place)):
        rows = 100 * random_tensor(num_rows, shape[1], seed=seed, dtype=dtype)
        residual = random_tensor(num_rows, shape[0], seed=seed + 10, dtype=dtype)
        rows[where], residual[where] = row, residual_row
        results.append((linear(rows)[where], linear.add_to(residual, rows)[where]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@HAS_FP16
def test_weights_that_come_in_16_bits_are_packed_in_16_bits() -> None:
    weight = random_tensor(40, 60, seed=1, dtype=torch.bfloat16).float() * 2.0**-10
    linear = make_linear(Weights(weight), torch.float32)
    assert isinstance(linear, FbgemmLinear)
    rows = random_tensor(8, 60, seed=2, dtype=torch.float32)
    torch.testing.assert_close(linear(rows), rows @ weight.t(), rtol=1e-5, atol=1e-6)
    weight[3, 5] = 1 / 3
    assert not isinstance(make_linear(Weights(weight), torch.float32), FbgemmLinear)


@HAS_FP16
def test_with_weights_in_float16_equal_rows_have_equal_results_at_any_number() -> None:
    linear = FbgemmLinear(random_tensor(31, 200, seed=1, dtype=torch.float16), None)
    row = random_tensor(1, 200, seed=2, dtype=torch.float32)
    for number in range(1, 100):
        results = linear(row.repeat(number, 1))
        assert results.shape == (number, 31)
        assert torch.equal(results, results[:1].expand_as(results))


@HAS_FP16
def test_a_cpu_whose_products_never_agree_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.quantized, "linear_dynamic_fp16", lambda rows, _: torch.randn(len(rows), 32))
    with pytest.raises(ConfigError, match="set the model's dtype to bfloat16"):
        _num_even_rows.__wrapped__(2)
