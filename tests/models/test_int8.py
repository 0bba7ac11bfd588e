"""Products in int8: as near to the exact ones as their steps allow, and only where they are quick."""

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
from amusd.models import linear
from amusd.models.linear import FbgemmLinear, largest_int8_weight, to_int8, why_not_int8
from amusd.models.numerics import Numerics
from amusd.runner.load_options import LoadOptions

SMALLEST_STEP = 6.2e-5
CPU = torch.device("cpu")
HAS_INT8 = pytest.mark.skipif(why_not_int8(CPU) is not None, reason=f"no int8 products: {why_not_int8(CPU)}")


def random_tensor(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@HAS_INT8
@settings(max_examples=30)
@given(
    st.integers(1, 70),
    st.integers(1, 300),
    st.integers(1, 33),
    st.booleans(),
    st.floats(1e-3, 1e3),
    st.integers(0, 99),
)
def test_a_product_is_the_exact_one_within_the_steps_of_inputs_and_weights(
    num_outputs: int, num_inputs: int, num_rows: int, has_bias: bool, size: float, seed: int
) -> None:
    weight, rows = random_tensor(num_outputs, num_inputs, seed=seed), size * random_tensor(num_rows, num_inputs, seed=7)
    bias = random_tensor(num_outputs, seed=2) if has_bias else None
    residual = random_tensor(num_rows, num_outputs, seed=3)
    before, linear = residual.clone(), FbgemmLinear(weight, bias, int8=True)
    exact = rows.double() @ weight.double().t() + (0 if bias is None else bias.double())
    weight_step = weight.abs().amax(dim=1) / largest_int8_weight()
    input_step = ((rows.amax().clamp(min=0) - rows.amin().clamp(max=0)) / 255).clamp(min=SMALLEST_STEP)
    # half a step of each factor times the other, and of an input that is at the edge of the range a whole one
    allowed = 0.5 * rows.abs().sum(1, keepdim=True) * weight_step + input_step * (
        weight.abs().sum(1) + num_inputs * weight_step
    )
    result = linear(rows)
    assert result.dtype is torch.float32
    assert ((result - exact).abs() <= 1.001 * allowed + 1e-6).all()
    assert torch.equal(linear.add_to(residual, rows), result + residual)
    assert torch.equal(residual, before)


@pytest.mark.parametrize(("has_vnni", "expected"), [(True, 127), (False, 64)])
def test_weights_have_seven_bits_on_cpus_without_vnni(
    has_vnni: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: has_vnni)
    assert largest_int8_weight() == expected
    assert to_int8(random_tensor(20, 50, seed=1), expected)[0].abs().amax(dim=1).eq(expected).all()
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
