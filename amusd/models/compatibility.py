"""Decides from a model's configuration alone whether this package can run it: reads no weight, loads no other library.

A model is refused if its cache could not be cut back to an earlier token, or if its checkpoint is quantized in another
form than FP8 of compressed-tensors with a scale per output of a weight and a scale per row of activations, found as it
comes ("FP8-dynamic"). In that form a row's result does not depend on the rows beside it, which exact verification needs
(`numerics.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from amusd.errors import UnsupportedModelError

_STATELESS_LAYERS = frozenset({"full_attention", "moe", "mlp"})
_WINDOW_OF_LAYER = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}

QUANTIZATION_NAMES = ("quantization_config", "compression_config")
"""Attributes of a transformers configuration that say how its checkpoint is quantized; the second is the older."""
_INSTEAD = "use the checkpoint in bfloat16, or one in FP8 of compressed-tensors with a scale per channel (FP8-dynamic)"
_NO_KERNELS = "there are no products with such weights here"
_METHODS: Mapping[str, tuple[str, str]] = {
    "awq": ("AWQ", _NO_KERNELS),
    "gptq": ("GPTQ", _NO_KERNELS),
    "auto-round": ("AutoRound", _NO_KERNELS),
    "aqlm": ("AQLM", _NO_KERNELS),
    "bitnet": ("BitNet", _NO_KERNELS),
    "eetq": ("EETQ", _NO_KERNELS),
    "higgs": ("HIGGS", _NO_KERNELS),
    "hqq": ("HQQ", _NO_KERNELS),
    "mxfp4": ("MXFP4", _NO_KERNELS),
    "quanto": ("Quanto", _NO_KERNELS),
    "spqr": ("SpQR", _NO_KERNELS),
    "vptq": ("VPTQ", _NO_KERNELS),
    "modelopt": ("ModelOpt", "its scales belong to whole tensors or to blocks, and there are no such products here"),
    "quark": ("Quark", "its scales belong to whole tensors or to blocks, and there are no such products here"),
    "torchao": ("torchao", "its weights are stored as objects of that library"),
    "fbgemm_fp8": ("FBGEMM FP8", "its products clip activations at a bound of their own"),
}
"""The usual name of each `quant_method`, and why it cannot run."""
_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
_ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}


def supported_class(config: Any, max_model_len: int) -> Any:
    """The causal language model class of transformers for a configuration.

    Raises `UnsupportedModelError`, naming model type and reason, for a model that this package cannot run.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    for reason in _reasons(config, model_class, max_model_len):
        raise UnsupportedModelError(f"model type '{config.model_type}' is not supported: {reason}")
    return model_class


def position_limit(config: Any) -> int | None:
    """Longest sequence whose keys do not depend on its length; None if no limit is known."""
    text = config.get_text_config(decoder=True)
    trained = getattr(text, "max_position_embeddings", None)
    limits = [_stretched(trained, _rope_parameters(text))]
    for rope in _rope_parameters(text):
        # These two switch their frequencies in mid-sequence, when the keys already cached cannot follow.
        if rope.get("rope_type") in ("dynamic", "longrope"):
            limits.append(rope.get("original_max_position_embeddings"))
            limits.append(getattr(text, "original_max_position_embeddings", None))
    known = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    return min(known) if known else None


def _stretched(trained: int | None, ropes: Iterable[Mapping[str, Any]]) -> int | None:
    """Number of positions that the rotary frequencies of a model trained with `trained` positions are meant for.

    Configurations of `linear` and `yarn` often give the length that the model was trained with (Qwen2.5's card adds a
    factor of 4 to 32,768 positions), and sometimes the stretched one, which their own original length tells apart.
    """
    if not trained:
        return trained
    stretched = [trained]
    for rope in ropes:
        if rope.get("rope_type") in ("linear", "yarn"):
            original = rope.get("original_max_position_embeddings") or trained
            stretched.append(int(original * (rope.get("factor") or 1)))
    return max(stretched)


def _reasons(config: Any, model_class: Any | None, max_model_len: int) -> Iterator[str]:
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder; a causal language model is needed"
    if model_class is None:
        yield "transformers has no causal language model for it"
    if getattr(model_class, "_is_stateful", False):
        yield "its recurrent state cannot be rolled back to an earlier token"
    layer_types = getattr(text, "layer_types", None) or []
    for layer_type in sorted(set(layer_types) - _STATELESS_LAYERS - _WINDOW_OF_LAYER.keys()):
        yield f"the state of its {layer_type} layers cannot be rolled back to an earlier token"
    yield from _window_reasons(text, layer_types, max_model_len)
    if getattr(text, "num_kv_shared_layers", 0) or getattr(text, "kv_sharing_modes", None):
        yield "its layers share keys and values"
    if getattr(text, "index_topk", None):
        yield "its sparse attention keeps an index that cannot be rolled back"
    if getattr(text, "alibi", False) or not getattr(text, "is_causal", True):
        yield "its attention is not plain causal attention"
    if not getattr(model_class, "_supports_attention_backend", False):
        yield "transformers does not let its attention be replaced"


def _window_reasons(text: Any, layer_types: list[str], max_model_len: int) -> Iterator[str]:
    for layer_type, attribute in _WINDOW_OF_LAYER.items():
        window = getattr(text, attribute, None)
        used = layer_type in layer_types or not layer_types
        if used and window is not None and window < max_model_len:
            yield (
                f"its window of {window} tokens overwrites what a rollback needs beyond that length; "
                f"max_model_len={max_model_len} must be at most {window}"
            )


def _rope_parameters(text: Any) -> Iterator[Mapping[str, Any]]:
    parameters = getattr(text, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        yield parameters
    yield from (entry for entry in parameters.values() if isinstance(entry, Mapping))


def check_quantization(name: object, config: Any) -> None:
    """Raise `UnsupportedModelError` if the model called `name` is quantized in a way that cannot run exactly."""
    if (reason := why_not_run(config)) is not None:
        raise UnsupportedModelError(f"model {name}: {reason}; {_INSTEAD}")


def why_not_run(config: Any) -> str | None:
    """Why a quantized checkpoint of this transformers configuration cannot run; None: it can, or is not quantized."""
    settings = _quantization(config)
    if settings is None:
        return None
    method = _method(settings)
    if method == "compressed-tensors":
        difference = _difference(settings)
        return None if difference is None else f"quantized with compressed-tensors: {difference}"
    if method == "bitsandbytes":
        return _bitsandbytes(settings)
    if method == "fp8":
        return _whole_tensors_or_blocks(settings)
    if method in _METHODS:
        title, reason = _METHODS[method]
        return f"quantized with {title}: {reason}"
    return f"quantized with {method or 'a method that it does not name'}: unknown here"


def is_fp8(config: Any) -> bool:
    """Whether the checkpoint is in the form of FP8 that runs."""
    settings = _quantization(config)
    return settings is not None and _method(settings) == "compressed-tensors" and _difference(settings) is None


def _quantization(config: Any) -> Mapping[str, Any] | None:
    """The quantization that a configuration or its text model names, by either name that it has had."""
    for part in (config, config.get_text_config(decoder=True)):
        for name in QUANTIZATION_NAMES:
            if found := getattr(part, name, None):
                return found if isinstance(found, Mapping) else dict(found.to_dict())
    return None


def _method(settings: Mapping[str, Any]) -> str:
    if settings.get("load_in_8bit") or settings.get("load_in_4bit"):
        return "bitsandbytes"  # which named itself in this way only, once
    return str(settings.get("quant_method") or "")


def _bitsandbytes(settings: Mapping[str, Any]) -> str:
    if settings.get("load_in_8bit"):
        return "quantized with bitsandbytes (8 bits): outliers are found over all rows, so a row depends on the others"
    return "quantized with bitsandbytes (4 bits): it multiplies one row by another kernel than several"


def _whole_tensors_or_blocks(settings: Mapping[str, Any]) -> str:
    if block := settings.get("weight_block_size"):
        shape = " x ".join(str(size) for size in block)
        return f"quantized in FP8 by blocks of {shape}: there are no products with a scale per block here"
    if settings.get("activation_scheme") == "static":
        return "quantized in FP8 per tensor: its activations have a scale fixed beforehand; there are no such products"
    return "quantized in FP8 per tensor: one scale for all rows makes a row depend on the others"


def _difference(settings: Mapping[str, Any]) -> str | None:
    """How settings of compressed-tensors differ from the form that runs; None if they do not."""
    groups = list((settings.get("config_groups") or {}).values())
    if len(groups) != 1:
        return f"it has {len(groups)} groups of layers, allowed: 1"
    if settings.get("kv_cache_scheme"):
        return "its keys and values are quantized"
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return "its weights are sparse"
    if groups[0].get("output_activations"):
        return "its outputs are quantized"
    for part, wanted in (("weights", _WEIGHTS), ("input_activations", _ACTIVATIONS)):
        found = groups[0].get(part)
        if not found:
            return f"its {part} are not quantized"
        for key, value in wanted.items():
            if found.get(key) != value:
                return f"its {part} have {key}={found.get(key)}, allowed: {value}"
    stored = groups[0].get("format") or settings.get("format")
    return None if stored in (None, "float-quantized") else f"its format is {stored}, allowed: float-quantized"
