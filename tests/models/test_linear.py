"""Packed products: the same numbers as plain ones, for any shape, and for any row wherever it stands.

This includes weights packed in float16, which can hold those of bfloat16.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import tiny
from passes import forward
from torch import Tensor

from amusd.checkpoints.building import load_model
from amusd.checkpoints.loading import draft_dtype, target_dtype
from amusd.config import DrafterConfig, EngineConfig, TargetConfig
from amusd.errors import ConfigError
from amusd.models import linear
from amusd.models.linear import FbgemmLinear, PackedLinear, PlainLinear, largest_int8_weight, why_not_int8
from amusd.models.numerics import Numerics
from amusd.runner.load_options import LoadOptions

SHAPES = [(1, 1), (31, 200), (97, 33), (577, 576)]
"""[out, in]"""
ROWS = [1, 8, 9, 33]
EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}
CPU = torch.device("cpu")
DTYPES = [
    pytest.param(
        dtype,
        id=str(dtype),
        marks=pytest.mark.skipif(not linear.can_pack(CPU, dtype), reason=f"this torch packs no {dtype}"),
    )
    for dtype in EPSILON
]
HAS_FP16 = pytest.mark.skipif(not linear.multiplies_fp16(CPU, torch.float32), reason="no products with float16 weights")
KINDS = [
    *(pytest.param(PackedLinear, *dtype.values, id=str(dtype.id), marks=dtype.marks) for dtype in DTYPES),
    pytest.param(FbgemmLinear, torch.float32, id="weights in float16", marks=HAS_FP16),
]


def random_tensor(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(shape: tuple[int, int], dtype: torch.dtype, *, has_bias: bool) -> tuple[Tensor, Tensor | None]:
    weight = random_tensor(*shape, seed=1, dtype=torch.bfloat16).to(dtype)
    return weight, random_tensor(shape[0], seed=2, dtype=dtype) if has_bias else None


def assert_within_rounding(result: Tensor, exact: Tensor, magnitude: Tensor) -> None:
    """`magnitude`: the sum of the absolute values of the terms; one rounding of the result is added."""
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
        for product in (packed, plain):
            assert_within_rounding(product(rows), exact, magnitude)
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
    product = linear.make_linear(linear.Weights(weight), torch.float32)
    assert isinstance(product, FbgemmLinear)
    rows = random_tensor(8, 60, seed=2)
    torch.testing.assert_close(product(rows), rows @ weight.t(), rtol=1e-5, atol=1e-6)
    weight[3, 5] = 1 / 3
    assert not isinstance(linear.make_linear(linear.Weights(weight), torch.float32), FbgemmLinear)


@HAS_FP16
def test_with_weights_in_float16_equal_rows_have_equal_results_at_any_number() -> None:
    linear = FbgemmLinear(random_tensor(31, 200, seed=1, dtype=torch.float16), None)
    row = random_tensor(1, 200, seed=2)
    for number in range(1, 100):
        results = linear(row.repeat(number, 1))
        assert results.shape == (number, 31)
        assert torch.equal(results, results[:1].expand_as(results))


@HAS_FP16
def test_a_cpu_whose_products_never_agree_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.quantized, "linear_dynamic_fp16", lambda rows, _: torch.randn(len(rows), 32))
    with pytest.raises(ConfigError, match="set the model's dtype to bfloat16"):
        linear._num_uniform_rows.__wrapped__(2)


# Products in int8: as near to the exact ones as their steps allow, and only where they are quick

SMALLEST_STEP = 6.2e-5
HAS_INT8 = pytest.mark.skipif(why_not_int8(CPU) is not None, reason=f"no int8 products: {why_not_int8(CPU)}")


@HAS_INT8
@settings(max_examples=30)
@given(st.integers(1, 70), st.integers(1, 300), st.integers(1, 33), st.booleans(), st.floats(0.001, 1e3))
def test_a_product_is_the_exact_one_within_the_steps_of_inputs_and_weights(
    num_outputs: int, num_inputs: int, num_rows: int, has_bias: bool, size: float
) -> None:
    weight, rows = random_tensor(num_outputs, num_inputs, seed=1), size * random_tensor(num_rows, num_inputs, seed=7)
    bias = random_tensor(num_outputs, seed=2) if has_bias else None
    residual = random_tensor(num_rows, num_outputs, seed=3)
    before, linear = residual.clone(), FbgemmLinear(weight, bias, int8=True)
    exact = rows.double() @ weight.double().t() + (0 if bias is None else bias.double())
    weight_step = weight.abs().amax(dim=1) / largest_int8_weight()
    input_step = ((rows.amax().clamp(min=0) - rows.amin().clamp(max=0)) / 255).clamp(min=SMALLEST_STEP)
    # half a step of each factor times the other, and of an input that is at the edge of the range a whole one
    of_inputs = input_step * (weight.abs().sum(1) + num_inputs * weight_step)
    allowed = 0.5 * rows.abs().sum(1, keepdim=True) * weight_step + of_inputs
    result = linear(rows)
    assert result.dtype is torch.float32
    assert ((result - exact).abs() <= 1.001 * allowed + 1e-6).all()
    assert torch.equal(linear.add_to(residual, rows), result + residual)
    assert torch.equal(residual, before)


@pytest.mark.parametrize(("has_vnni", "expected"), [(True, 127), (False, 64)])
def test_weights_have_seven_bits_without_vnni(has_vnni: bool, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: has_vnni)
    assert largest_int8_weight() == expected
    assert linear.to_int8(random_tensor(20, 50, seed=1), expected)[0].abs().amax(dim=1).eq(expected).all()
    assert has_vnni or 2 * 255 * largest_int8_weight() < 2**15


@HAS_INT8
@pytest.mark.parametrize("name", ["LlamaConfig", "Qwen3Config"])
def test_a_model_in_int8_is_nearly_the_model(name: str, tmp_path: Path) -> None:
    tiny.save_checkpoint(tmp_path, tiny.tiny_config(name))
    options = LoadOptions(numerics=Numerics(width=8, fixed=False), max_model_len=64)
    exact, coarse = (load_model(tmp_path, replace(options, dtype=dtype)) for dtype in ("float32", "int8"))
    ids = list(range(1, 9))
    logits = [forward(model, ids, model.new_cache(64)).logits for model in (exact, coarse)]
    error = (logits[0] - logits[1]).norm() / logits[0].norm()
    assert 0 < error < 0.05
    assert coarse.weight_bytes < 0.5 * exact.weight_bytes


def test_auto_is_int8_where_a_draft_ships_so_and_the_cpu_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "amusd.checkpoints.loading.why_not_int8", lambda device: None if device.type == "cpu" else "no CPU"
    )
    monkeypatch.setattr(linear, "can_multiply_bfloat16", lambda: True)
    embedded = DrafterConfig(kind="embedded")
    assert draft_dtype(embedded, "cpu", None) == draft_dtype(DrafterConfig(kind="synthetic"), "cpu", None) == "int8"
    assert draft_dtype(embedded, "cuda:0", None) == "bfloat16"
    assert draft_dtype(replace(embedded, dtype="float32"), "cpu", None) == "float32"


@pytest.mark.parametrize(("has_bfloat16", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_auto_is_float32_on_cpus_without_bfloat16_products(
    has_bfloat16: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "can_multiply_bfloat16", lambda: has_bfloat16)
    assert target_dtype(EngineConfig(), "cpu") == expected
    assert draft_dtype(DrafterConfig(kind="hf", model="m"), "cpu", None) == expected
    assert target_dtype(EngineConfig(), "cuda:0") == "bfloat16"
    assert target_dtype(EngineConfig(target=TargetConfig(dtype="float16")), "cpu") == "float16"
