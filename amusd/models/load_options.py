"""Options for loading a model, and the forward pass that follows from them: known before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from amusd.errors import UnsupportedModelError
from amusd.models.compatibility import why_not_covered
from amusd.models.features import FeatureSpec
from amusd.models.graphs import Capture
from amusd.models.linear import INT8, why_not_int8
from amusd.models.numerics import Numerics
from amusd.models.sharding import ALONE, Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """How a model computes, and where."""

    numerics: Numerics
    """The rule by which passes are cut and padded."""
    max_model_len: int
    """Longest sequence in tokens; a model whose own limit is lower keeps to that."""
    dtype: str = "bfloat16"
    """Dtype of the weights: one of torch's, or `int8`, into which they are converted from float32."""
    device: str = "cpu"
    model_impl: str = "auto"
    """`amusd` for the lean decoder, `transformers` for its own code, `auto` for the first that covers the model."""
    capture: Capture | None = None
    """How passes on a GPU are captured to be replayed; None on a CPU."""
    num_layers: int | None = None
    """The checkpoint's first layers that are loaded, and its norm and head; None: all of them."""
    tokens_per_step: int = 1
    """Tokens at most that a device chooses one after another without the host."""
    ranks: Ranks = ALONE
    """The processes that share the model."""
    features: Mapping[str, FeatureSpec] = field(default_factory=dict)
    """The features that drafters read of it, by their names."""

    def check(self, config: Any) -> None:
        """Raise `UnsupportedModelError` if the model of a transformers configuration cannot be loaded like this."""
        check_forward_pass(config, self.model_impl, self.dtype, self.device, self.ranks.size)


def uses_decoder(config: Any, model_impl: str) -> bool:
    """Whether `Decoder` computes the model of a configuration; if not, `HuggingFaceNetwork` does.

    Raises `UnsupportedModelError` if `model_impl` is `amusd` and the decoder does not cover the model.
    """
    return _why_adapter(config, model_impl) is None


def _why_adapter(config: Any, model_impl: str) -> str | None:
    """Why `HuggingFaceNetwork` computes a configuration's model; None: `Decoder` does. Raises as `uses_decoder`."""
    reason = why_not_covered(config)
    if model_impl == "amusd" and reason is not None:
        raise UnsupportedModelError(f"model_impl=amusd: model type '{config.model_type}': {reason}")
    return "model_impl=transformers" if model_impl == "transformers" else reason


def check_forward_pass(config: Any, model_impl: str, dtype: str, device: str, num_ranks: int = 1) -> None:
    """Raise `UnsupportedModelError` if no forward pass computes the model of a configuration like this."""
    adapter = _why_adapter(config, model_impl)
    if dtype == INT8:
        if adapter is not None:
            raise UnsupportedModelError(f"dtype=int8: only the lean decoder multiplies in int8: {adapter}")
        if (reason := why_not_int8(torch.device(device))) is not None:
            raise UnsupportedModelError(f"dtype=int8: there are no fast int8 products: {reason}")
    if num_ranks > 1:
        setting = f"target_tensor_parallel_size={num_ranks}"
        if adapter is not None:
            raise UnsupportedModelError(f"{setting}: ranks share the lean decoder only: {adapter}; allowed: 1")
        if num_ranks > (num_heads := config.num_key_value_heads):
            raise UnsupportedModelError(
                f"{setting}: each rank needs a key head, and this model has {num_heads}; allowed: 1 to {num_heads}"
            )


def loaded_dtype(dtype: str) -> torch.dtype:
    """The dtype as which weights are read for a model in `dtype`: int8 ones are made from float32."""
    result: torch.dtype = torch.float32 if dtype == INT8 else getattr(torch, dtype)
    return result
