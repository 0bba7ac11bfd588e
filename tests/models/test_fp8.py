"""Products in FP8: their numbers, rows that do not depend on each other, and the layout that CUDA's kernels take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from amusd.errors import UnsupportedModelError
from amusd.models.linear import (
    FP8,
    ConvertedFp8Linear,
    Fp8Linear,
    Linear,
    Weights,
    make_linear,
    to_fp8,
    why_not_fp8,
)

OUT, IN = 48, 64
LARGEST = 448.0
HALF_STEP = 2.0**-4
"""Relative error of a number in FP8, which has three bits behind the leading one."""


def random_weights(seed: int = 0, *, bias: bool = True) -> Weights:
    """In FP8, with scales of their own for rows whose sizes differ by some thousands."""
    generator = torch.Generator().manual_seed(seed)
    exact = torch.randn(OUT, IN, generator=generator) * torch.logspace(-3, 1, OUT).unsqueeze(1)
    matrix, scale = to_fp8(exact)
    return Weights(matrix, torch.randn(OUT, generator=generator) if bias else None, scale)


def random_rows(count: int = 6, seed: int = 1) -> Tensor:
    return torch.randn(count, IN, generator=torch.Generator().manual_seed(seed)) * torch.logspace(0, 2, IN)


def dequantized(values: Tensor, scales: Tensor) -> Tensor:
    return values.double() * scales


def reference(weights: Weights, rows: Tensor) -> Tensor:
    """The product as it is defined, in float64."""
    assert weights.scale is not None
    product = dequantized(*to_fp8(rows)) @ dequantized(weights.matrix, weights.scale).t()
    return product if weights.bias is None else product + weights.bias.double()


def converted(weights: Weights, dtype: torch.dtype) -> Linear:
    assert weights.scale is not None
    bias = None if weights.bias is None else weights.bias.to(dtype)
    return ConvertedFp8Linear(weights.matrix, bias, weights.scale, dtype)


def test_the_largest_number_of_each_row_becomes_the_largest_of_fp8() -> None:
    rows = random_rows() * torch.logspace(-6, 4, 6).unsqueeze(1)
    values, scales = to_fp8(rows)
    assert (values.dtype, scales.dtype, scales.shape) == (FP8, torch.float32, (6, 1))
    assert values.float().abs().amax(dim=1).tolist() == [LARGEST] * 6
    error = (dequantized(values, scales) - rows).abs()
    assert (error <= HALF_STEP * rows.abs() + scales * 2**-10).all()


def test_a_row_of_zeros_stays_one() -> None:
    values, scales = to_fp8(torch.zeros(2, IN))
    assert not values.float().any()
    assert scales.isfinite().all()


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "with a bias"])
def test_in_float32_the_converted_product_is_the_defined_one(bias: bool) -> None:
    weights, rows = random_weights(bias=bias), random_rows()
    result, expected = converted(weights, torch.float32)(rows), reference(weights, rows)
    torch.testing.assert_close(result.double(), expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "with a bias"])
def test_in_bfloat16_it_is_rounded_twice(bias: bool) -> None:
    weights, rows = random_weights(bias=bias), random_rows().bfloat16()
    rounded = weights if weights.bias is None else replace(weights, bias=weights.bias.bfloat16())
    result, expected = converted(weights, torch.bfloat16)(rows), reference(rounded, rows)
    assert result.dtype is torch.bfloat16
    unbiased = reference(replace(rounded, bias=None), rows)
    assert ((result - expected).abs() <= 2**-8 * (unbiased.abs() + expected.abs()) + 1e-6).all()


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "with a bias"])
def test_the_products_of_cuda_mean_the_same(bias: bool) -> None:
    """torch defines them on a CPU too: the scales and the order of the operands can be seen there."""
    weights, rows = random_weights(bias=bias), random_rows().bfloat16()
    rounded = weights if weights.bias is None else replace(weights, bias=weights.bias.bfloat16())
    assert rounded.scale is not None
    result = Fp8Linear(rounded.matrix, rounded.bias, rounded.scale)(rows)
    expected = reference(rounded, rows)
    assert result.dtype is torch.bfloat16
    torch.testing.assert_close(result.double(), expected, atol=1e-3 * float(expected.abs().max()), rtol=2**-7)


def test_it_is_near_the_product_of_the_exact_rows() -> None:
    weights, rows = random_weights(bias=False), random_rows()
    assert weights.scale is not None
    exact = rows.double() @ dequantized(weights.matrix, weights.scale).t()
    error = (reference(weights, rows) - exact).abs() / exact.square().mean(dim=0).sqrt()
    assert 0.001 < error.square().mean().sqrt() < HALF_STEP, "rows are either not rounded or rounded too much"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_rows_bits_do_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    linear, rows = converted(random_weights(), dtype), random_rows(8).to(dtype)
    others = rows.clone()
    others[:3] *= 1e4
    others[4:] = random_rows(4, seed=7).to(dtype) * 1e-3
    assert torch.equal(linear(rows)[3], linear(others)[3])
    assert not torch.equal(linear(rows)[2], linear(others)[2])


def test_a_residual_is_added_to_the_product() -> None:
    linear, rows = converted(random_weights(), torch.float32), random_rows()
    residual = torch.randn(6, OUT, generator=torch.Generator().manual_seed(3))
    before = residual.clone()
    assert torch.equal(linear.add_to(residual, rows), before + linear(rows))
    assert torch.equal(residual, before)


def test_weights_are_counted_as_they_are_held() -> None:
    weights = random_weights()
    scale_and_bias = OUT * 4 + OUT * 2
    assert weights.scale is not None
    bias = torch.zeros(OUT, dtype=torch.bfloat16)
    assert Fp8Linear(weights.matrix, bias, weights.scale).nbytes == OUT * IN + scale_and_bias
    assert converted(weights, torch.bfloat16).nbytes == OUT * IN * 2 + scale_and_bias


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> Any:
    def pretend(major: int, minor: int) -> None:
        monkeypatch.setattr("amusd.models.linear.device_capability", lambda _device: (major, minor))

    return pretend


GPU = torch.device("cuda:1")


def test_products_in_fp8_are_for_bfloat16_on_newer_gpus(capability: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_fp8(torch.device("cpu"), torch.bfloat16) == "not on cpu"
    capability(8, 0)
    assert why_not_fp8(GPU, torch.bfloat16) == "need compute capability 8.9, and cuda:1 has 8.0"
    capability(9, 0)
    assert why_not_fp8(GPU, torch.bfloat16) is None
    assert why_not_fp8(GPU, torch.float32) == "not into float32"
    capability(8, 9)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.12.0+cu130"))
    assert why_not_fp8(GPU, torch.bfloat16) is None
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0+cu130"))
    assert why_not_fp8(GPU, torch.bfloat16) == "need torch 2.12 on cuda:1, whose compute capability is 8.9"


def test_without_a_gpu_there_is_no_capability() -> None:
    if not torch.cuda.is_available():
        assert why_not_fp8(GPU, torch.bfloat16) == "need compute capability 8.9, and cuda:1 has 0.0"


def on_fake_gpu(outputs: int, inputs: int, *, bias: bool = True) -> Weights:
    matrix = torch.empty(outputs, inputs, dtype=FP8, device=GPU)
    some_bias = torch.empty(outputs, dtype=torch.bfloat16, device=GPU) if bias else None
    return Weights(matrix, some_bias, torch.empty(outputs, 1, device=GPU))


@pytest.mark.parametrize("rows", [1, 3, 8, 1024])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "with a bias"])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (48, 16)])
def test_cuda_takes_the_layout(rows: int, bias: bool, outputs: int, inputs: int, capability: Any) -> None:
    """torch checks dtypes, strides, multiples of 16 and the shapes of scales of a fake tensor on a GPU."""
    capability(9, 0)
    with FakeTensorMode():
        linear = make_linear(on_fake_gpu(outputs, inputs, bias=bias), torch.bfloat16)
        assert isinstance(linear, Fp8Linear)
        result = linear(torch.empty(rows, inputs, dtype=torch.bfloat16, device=GPU))
    assert (result.shape, result.dtype, result.device) == ((rows, outputs), torch.bfloat16, GPU)


def test_the_check_of_the_layout_can_fail() -> None:
    with FakeTensorMode():
        matrix, scale = torch.empty(32, 48, dtype=FP8, device=GPU).t(), torch.empty(48, 1, device=GPU)
        with pytest.raises(RuntimeError, match="must be col_major"):
            Fp8Linear(matrix, None, scale)(torch.empty(8, 32, dtype=torch.bfloat16, device=GPU))


@pytest.mark.parametrize(("outputs", "inputs"), [(40, 64), (64, 40)])
def test_sizes_that_cuda_does_not_take_are_converted_at_each_product(
    outputs: int, inputs: int, capability: Any
) -> None:
    capability(9, 0)
    with FakeTensorMode():
        weights = on_fake_gpu(outputs, inputs)
        linear = make_linear(weights, torch.bfloat16)
        assert isinstance(linear, ConvertedFp8Linear)
        assert linear(torch.empty(3, inputs, dtype=torch.bfloat16, device=GPU)).shape == (3, outputs)
        assert linear.nbytes == outputs * inputs + outputs * 6, "a GPU holds the weights in FP8"


def test_weights_without_scales_are_left_to_other_layers() -> None:
    linear = make_linear(Weights(torch.ones(OUT, IN)), torch.float32)
    assert not isinstance(linear, (Fp8Linear, ConvertedFp8Linear))


def test_parts_of_a_layer_are_joined_with_their_scales() -> None:
    first, second = random_weights(0), random_weights(1)
    order = torch.tensor([5, 0, 47])
    joined = Weights.join([first.outputs(order), replace(second, bias=None)])
    rows = random_rows()
    expected = torch.cat((reference(first, rows)[:, order], reference(replace(second, bias=None), rows)), dim=1)
    torch.testing.assert_close(
        converted(joined, torch.float32)(rows).double(), expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5
    )


def test_layers_in_fp8_are_not_joined_with_others() -> None:
    with pytest.raises(UnsupportedModelError, match="some of the weights that share a product are in FP8"):
        Weights.join([random_weights(), Weights(torch.ones(OUT, IN))])
