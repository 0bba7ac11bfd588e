"""Options for loading a model, checked before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from amusd.errors import ConfigError
from amusd.models.configuration import ModelConfig
from amusd.models.features import FeatureSpec
from amusd.models.graphs import Capture
from amusd.models.linear import INT8, why_not_int8
from amusd.models.numerics import Numerics
from amusd.models.sharding import ALONE, Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """How a model computes, and where."""

    numerics: Numerics
    max_model_len: int
    """Longest sequence in tokens; a lower limit of the model holds."""
    dtype: str = "bfloat16"
    """Dtype of the weights: one of torch's, or `int8`, converted from float32."""
    device: str = "cpu"
    model_impl: str = "auto"
    """`amusd`: the lean decoder; `transformers`: its own code; `auto`: the first that covers the model."""
    capture: Capture | None = None
    """How passes are captured on a GPU; None on a CPU."""
    num_layers: int | None = None
    """Load only so many first layers, with norm and head; None: all."""
    tokens_per_step: int = 1
    """Most tokens that a device chooses without the host."""
    ranks: Ranks = ALONE
    features: Mapping[str, FeatureSpec] = field(default_factory=dict)


def check_forward_pass(config: Any, dtype: str, device: str, num_ranks: int = 1) -> None:
    """Raise `ConfigError` unless so many ranks can compute the model in `dtype`."""
    is_lean = isinstance(config, ModelConfig)
    if dtype == INT8 and not is_lean:
        raise ConfigError("dtype=int8: transformers computes this model, which has no int8 products")
    check_int8(dtype, device)
    most = config.num_key_value_heads if is_lean else 1
    if num_ranks > most:
        reason = "each rank needs a key head" if is_lean else "ranks share amusd's decoder, not transformers' code"
        raise ConfigError(f"target_tensor_parallel_size={num_ranks}: {reason}; allowed: 1 to {most}")


def check_int8(dtype: str, device: str) -> None:
    """Raise `ConfigError` if `dtype` is int8 and `device` does not multiply it fast."""
    if dtype == INT8 and (reason := why_not_int8(torch.device(device))) is not None:
        raise ConfigError(f"dtype=int8: there are no fast int8 products: {reason}")


def loaded_dtype(dtype: str) -> torch.dtype:
    """Dtype in which weights are read; int8 ones are made from float32."""
    result: torch.dtype = torch.float32 if dtype == INT8 else getattr(torch, dtype)
    return result
