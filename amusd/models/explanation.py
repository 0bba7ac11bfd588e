"""Says which forward pass computes a model, and why: known from its configuration, before any weight is read."""

from __future__ import annotations

from typing import Any

import torch

from amusd.config import DrafterConfig, EngineConfig, ModelShape, TargetConfig
from amusd.models.embedded_target import embedded_target_path
from amusd.models.huggingface import check_fp8, check_int8, check_shares, load_config, why_adapter
from amusd.models.linear import INT8, why_not_fp8, why_not_packed
from amusd.models.loading import draft_dtype, draft_shape, target_dtype
from amusd.models.quantization import is_fp8
from amusd.models.synthetic import SHAPES, shape_config
from amusd.types import Role


def explain_target(config: EngineConfig, device: str) -> str:
    """The forward pass of the target on `device`, in one line. Raises as `load_target`."""
    shape, size = config.hardware.synthetic, config.target_tensor_parallel_size
    return _explain(config.target, shape, device, target_dtype(config, device), Role.TARGET, size)


def explain_drafter(
    config: DrafterConfig, device: str, target_shape: ModelShape | None = None, *, num_ranks: int = 1
) -> str | None:
    """The forward pass of a drafter's model on `device`, in one line; None without a model. Raises as `load_target`."""
    if config.kind == "ngram":
        return None
    dtype = draft_dtype(config, device, target_shape)
    return _explain(config, draft_shape(config, target_shape), device, dtype, Role.DRAFT, num_ranks)


def _explain(
    config: TargetConfig | DrafterConfig, shape: ModelShape | None, device: str, dtype: str, role: Role, num_ranks: int
) -> str:
    settings = _settings(config, shape)
    text = _forward_pass(config.model_impl, settings, device, dtype)
    check_fp8(settings, config.model_impl, dtype)
    check_int8(settings, config.model_impl, device, int8=dtype == INT8)
    check_shares(settings, config.model_impl, role, num_ranks)
    return text if num_ranks == 1 else f"{text}, {settings.num_key_value_heads} key heads shared by {num_ranks} ranks"


def _forward_pass(model_impl: str, settings: Any, device: str, dtype: str) -> str:
    if (adapter := why_adapter(settings, model_impl)) is not None:
        return f"transformers adapter: {adapter}"
    if dtype == INT8:
        return "lean decoder (packed weights: FBGEMM int8)"
    place, rows = torch.device(device), getattr(torch, dtype)
    if is_fp8(settings):
        return f"lean decoder ({_fp8_products(place, rows)})"
    reason = why_not_packed(place, rows)
    weights = f"packed weights: oneDNN {dtype}" if reason is None else f"weights as they are: {reason}"
    return f"lean decoder ({weights})"


def _fp8_products(device: torch.device, dtype: torch.dtype) -> str:
    if (reason := why_not_fp8(device, dtype)) is None:
        return "FP8 weights and rows: products in FP8"
    held = "converted once" if device.type == "cpu" else "converted at each product"
    name = str(dtype).removeprefix("torch.")
    return f"FP8 weights and rows: weights {held}, products in {name}: FP8 products {reason}"


def _settings(config: TargetConfig | DrafterConfig, shape: ModelShape | None) -> Any:
    """The transformers configuration of the model."""
    if shape is not None:
        return shape_config(SHAPES[shape])
    path = str(config.model) if config.kind == "hf" else embedded_target_path()
    return load_config(path)
