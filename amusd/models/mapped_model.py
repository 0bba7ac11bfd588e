"""A causal model of transformers whose weights lie in a checkpoint's mapped files, to be taken apart by `Decoder`.

Weights keep the dtype that they are stored in. None is read before it is copied, so beside the decoder memory holds at
most one layer or the embeddings again, whatever the dtypes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from amusd.errors import ConfigError, UnsupportedModelError
from amusd.models.attention import register_attention
from amusd.models.checkpoint import CONFIG, Checkpoint
from amusd.models.quantization import CONFIG_NAMES, is_fp8

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_FP8 = "F8_E4M3"
"""The format's name of the dtype."""


def check_dtypes(checkpoint: Checkpoint, config: Any) -> None:
    """Raise `UnsupportedModelError` for weights whose numbers mean nothing without scales that nobody would apply."""
    allowed = _FLOATS | ({_FP8} if is_fp8(config) else set())
    for name in checkpoint.names:
        if name.endswith(".weight") and (dtype := checkpoint.dtype(name)) not in allowed:
            raise UnsupportedModelError(
                f"model {checkpoint.path}: {name} is stored as {dtype}, and config.json says nothing of it"
            )


def mapped_model(checkpoint: Checkpoint, config: Any) -> Any:
    """The model of a configuration that `Decoder` covers. Raises `ConfigError` if weights are missing or do not fit."""
    model = _empty_model(config)
    _place_fp8(model, checkpoint)
    places: dict[Tensor, list[str]] = {}  # a tied weight has several
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(parameter, []).append(name)
    missing: list[str] = []
    for parameter, names in places.items():
        missing += _place(model, checkpoint, parameter, names)
    if missing:
        raise ConfigError(f"model {checkpoint.path}: the checkpoint lacks weights, {min(missing)} among them")
    model.base_model.rotary_emb = type(model.base_model.rotary_emb)(model.config)  # on `meta` it has no frequencies
    return model


def _empty_model(config: Any) -> Any:
    """The model on `meta`, without the quantizer of transformers."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    for name in CONFIG_NAMES:
        if hasattr(config, name):
            delattr(config, name)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=register_attention())


def _place_fp8(model: Any, checkpoint: Checkpoint) -> None:
    """Give each layer whose weight is stored in FP8 that weight and its scales; a bias is placed with other parameters.

    They are no parameters, so `Module.to(dtype)` leaves them as they are; such a layer is read and computes nothing.
    """
    for name, module in list(model.named_modules()):
        weight, scale = f"{name}.weight", f"{name}.weight_scale"
        if not isinstance(module, torch.nn.Linear) or weight not in checkpoint or checkpoint.dtype(weight) != _FP8:
            continue
        if scale not in checkpoint:
            raise ConfigError(f"model {checkpoint.path}: the checkpoint lacks weights, {scale} among them")
        matrix, scales = checkpoint.tensor(weight), checkpoint.tensor(scale)
        _check_shape(checkpoint, weight, matrix, module.weight.shape)
        _check_shape(checkpoint, scale, scales, torch.Size((module.out_features, 1)))
        del module.weight
        module.weight, module.weight_scale = matrix, scales.to(torch.float32, copy=True)


def _place(model: Any, checkpoint: Checkpoint, expected: Tensor, names: list[str]) -> list[str]:
    """Put what is stored for one parameter where it belongs; returns what is missing.

    A parameter with several places is tied. If two of them are stored and differ, they are not tied, whatever the
    configuration says: so do transformers.
    """
    found = {name: stored for name in names if (stored := _find(model, checkpoint, name)) is not None}
    if not found:
        return names[:1]
    for name, tensor in found.items():
        _check_shape(checkpoint, name, tensor, expected.shape)
    first = next(iter(found.values()))
    shared = torch.nn.Parameter(first, requires_grad=False)
    for name in names:
        own = found.get(name, first)
        is_tied = own is first or torch.equal(own, first)
        module, _, leaf = name.rpartition(".")
        weight = shared if is_tied else torch.nn.Parameter(own, requires_grad=False)
        setattr(model.get_submodule(module), leaf, weight)
    return []


def _find(model: Any, checkpoint: Checkpoint, name: str) -> Tensor | None:
    """What is stored under a parameter's name, or under its name in a checkpoint of the model without a head."""
    for stored in (name, name.removeprefix(f"{model.base_model_prefix}.")):
        if stored in checkpoint:
            return checkpoint.tensor(stored)
    return None


def _check_shape(checkpoint: Checkpoint, name: str, tensor: Tensor, expected: torch.Size) -> None:
    if tensor.shape != expected:
        raise ConfigError(wrong_shape(checkpoint.path, name, tensor.shape, expected))


def wrong_shape(path: object, name: str, stored: Iterable[int], expected: Iterable[int]) -> str:
    """What is said of a weight whose shape is another than the configuration's."""
    return f"model {path}: {name} has shape {list(stored)}, and {CONFIG} asks for {list(expected)}"
