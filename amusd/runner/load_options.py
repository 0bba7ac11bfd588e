"""Options for loading a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from amusd.models.features import FeatureSpec
from amusd.models.linear import INT8
from amusd.models.numerics import Numerics
from amusd.models.sharding import ALONE, Ranks
from amusd.runner.graphs import Capture


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """How a model computes, and where."""

    numerics: Numerics
    """The rule for the rows and paths of a pass."""
    max_model_len: int
    """Longest sequence in tokens, unless the model's limit is lower."""
    dtype: str = "bfloat16"
    """Dtype of the weights: one of torch's, or `int8`, converted from float32."""
    device: str = "cpu"
    model_impl: str = "auto"
    """`transformers`: use transformers even for models that the lean decoder covers."""
    capture: Capture | None = None
    """How passes are captured on a GPU; None on a CPU."""
    tokens_per_step: int = 1
    """Most steps of a pass, all computed without the host."""
    state_bytes: int = 0
    """Most bytes of recurrent states that are kept for prompts with the same beginning."""
    ranks: Ranks = ALONE
    """Ranks that share the model; `capture` includes their exchanges."""
    features: Mapping[str, FeatureSpec] = field(default_factory=dict)


def loaded_dtype(dtype: str) -> torch.dtype:
    """Dtype in which weights are read; for `int8`, float32 before conversion."""
    result: torch.dtype = torch.float32 if dtype == INT8 else getattr(torch, dtype)
    return result
