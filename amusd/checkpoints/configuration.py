"""Reads model configurations: whether a model can run, and its longest sequence.

transformers reads the files. A checkpoint of our own (`PLAIN`) needs no transformers, whose import takes a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from amusd.checkpoints.checkpoint import find_checkpoint, one_line_errors, read_json
from amusd.checkpoints.settled import MODEL_TYPES
from amusd.errors import ConfigError
from amusd.files import CONFIG_JSON

PLAIN = "amusd"
"""Key of a `config.json` that states all of `ModelConfig`; the tokenizer beside it needs no transformers either."""

_ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")
_RECURRENT_LAYERS = frozenset({"conv", "hybrid", "linear_attention"})
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_WINDOW_OF_LAYER = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_STATELESS_LAYERS = frozenset({"full_attention", "moe", "mlp", *_WINDOW_OF_LAYER})


class ModelConfig(SimpleNamespace):
    """Configuration of a model that `Decoder` computes, under transformers' names."""

    def get_text_config(self, *, decoder: bool = True) -> ModelConfig:  # noqa: ARG002 - the signature is transformers'
        """Return `self`."""
        return self

    def standardize_rope_params(self) -> None:
        """Do nothing: transformers' formulas call this method."""


def load_config(path: str | Path, num_layers: int | None = None, model_impl: str = "auto") -> Any:
    """Load a checkpoint's configuration, cut to its first `num_layers` layers if given.

    A `ModelConfig` exactly if `Decoder` computes the model. Raises `ConfigError` for a missing file or too many layers.
    """
    folder = find_checkpoint(path)
    settings = read_json(path, folder, CONFIG_JSON)
    with one_line_errors(path, CONFIG_JSON):
        if PLAIN in settings and model_impl != "transformers":
            config: Any = ModelConfig(**settings)
        else:
            from amusd.checkpoints.transformers_models import load_stock_config

            stock = load_stock_config(folder)
            own = as_own(stock)  # checks the model for both implementations
            config = stock if own is None or model_impl == "transformers" else own
        if num_layers is not None:
            text = config.get_text_config(decoder=True)
            most = text.num_hidden_layers - 1
            if num_layers > most:
                raise ConfigError(f"drafter.num_layers={num_layers}: the target has {most + 1}; allowed: 1 to {most}")
            text.num_hidden_layers = num_layers
            if layer_types := getattr(text, "layer_types", None):
                with suppress(AttributeError):  # a property follows the number of layers
                    text.layer_types = layer_types[:num_layers]
    return config


def as_own(stock: Any) -> ModelConfig | None:
    """A configuration of transformers as a `ModelConfig`; None if `Decoder` does not compute the model.

    Raises `ValueError` for sizes that do not fit together, and for rotary angles of an unknown kind.
    """
    if stock.model_type not in MODEL_TYPES:
        return None
    _check(stock)
    is_common = stock.hidden_act in ("silu", "swish") and stock.rope_parameters.get("partial_rotary_factor", 1) == 1
    if not is_common or getattr(stock, "quantization_config", None) is not None:
        return None
    head_dim = getattr(stock, "head_dim", None) or stock.hidden_size // stock.num_attention_heads
    return ModelConfig(**{**stock.to_dict(), "head_dim": head_dim})


def _check(stock: Any) -> None:
    queries, keys = stock.num_attention_heads, stock.num_key_value_heads
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads", "vocab_size"):
        if (value := getattr(stock, name)) < 1:
            raise ValueError(f"{name}={value}; allowed: 1 or more")
    if queries % keys:
        raise ValueError(f"num_key_value_heads={keys}; allowed: what divides num_attention_heads={queries}")
    for name, value in stock.rope_parameters.items():
        if isinstance(value, (str, Mapping)) and name not in ("rope_type", "type"):
            raise ValueError(f"rope_parameters has {name}={value!r}; allowed: a number, for all layers")
    if (kind := stock.rope_parameters.get("rope_type")) not in _ROPE_TYPES:
        raise ValueError(f"rope_parameters has rope_type={kind}; allowed: {', '.join(_ROPE_TYPES)}")


def check_supported(config: Any, num_ranks: int = 1) -> None:
    """Raise `ConfigError`, naming type and reason, if this package cannot run the model on `num_ranks` ranks."""
    text = config.get_text_config(decoder=True)
    reasons = [] if isinstance(config, ModelConfig) else _stock_reasons(config, text)
    unknown = {*(getattr(text, "layer_types", None) or ())} - _STATELESS_LAYERS - _RECURRENT_LAYERS
    reasons += [f"the state of its {kind} layers cannot be rolled back to an earlier token" for kind in sorted(unknown)]
    if reasons:
        owner = getattr(config, "owner", f"model type '{config.model_type}'")
        raise ConfigError(f"{owner} is not supported: {reasons[0]}")
    is_lean = isinstance(config, ModelConfig)
    most = config.num_key_value_heads if is_lean else 1
    if num_ranks > most:
        reason = "each rank needs a key head" if is_lean else "ranks share amusd's decoder, not transformers' code"
        raise ConfigError(f"target_tensor_parallel_size={num_ranks}: {reason}; allowed: 1 to {most}")


def layer_windows(config: Any) -> list[int | None]:
    """The window of each layer in tokens; None: all tokens."""
    text = config.get_text_config(decoder=True)
    usual = "full_attention" if text.model_type == "llama" else "sliding_attention"
    layer_types = getattr(text, "layer_types", None) or [usual] * text.num_hidden_layers
    return [getattr(text, _WINDOW_OF_LAYER.get(layer_type, ""), None) for layer_type in layer_types]


def why_rows_vary(config: Any) -> str | None:
    """Why even padded passes change the bits of a row; None: no reason is known."""
    text = config.get_text_config(decoder=True)
    has_experts = any((vars(text).get(name) or 0) > 1 for name in _NUM_EXPERTS)  # `getattr` raises for numbers by layer
    if is_recurrent(config):
        return "the target has recurrent states"
    return "the target is a mixture of experts" if has_experts else None


def is_recurrent(config: Any) -> bool:
    """Whether layers keep a state beside keys and values."""
    if isinstance(config, ModelConfig):
        return False
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    layer_types = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    is_stateful = getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_is_stateful", False)
    return is_stateful or not _RECURRENT_LAYERS.isdisjoint(layer_types)


def position_limit(config: Any, max_model_len: int) -> int:
    """The longest sequence, up to `max_model_len`, whose keys do not depend on its length.

    With `linear` and `yarn`, `max_position_embeddings` is mostly the trained length; if it is the stretched one, the
    trained length is named, too.
    """
    text = config.get_text_config(decoder=True)
    longest = getattr(text, "max_position_embeddings", None) or 0
    parameters, limits = getattr(text, "rope_parameters", None) or {}, []
    for rope in (parameters, *parameters.values()):  # parameters by layer type are nested
        if not isinstance(rope, Mapping):
            continue
        kind, original = rope.get("rope_type"), rope.get("original_max_position_embeddings")
        if kind in ("linear", "yarn"):
            longest = max(longest, int((original or longest) * (rope.get("factor") or 1)))
        elif kind in ("dynamic", "longrope"):
            # Their frequencies change in mid-sequence, and cached keys cannot follow.
            limits += [original, getattr(text, "original_max_position_embeddings", None)]
    return min(limit for limit in (max_model_len, longest, *limits) if limit)


def _stock_reasons(config: Any, text: Any) -> list[str]:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    from amusd.checkpoints.recurrent_layers import has_recurrent_layers

    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)

    def has(name: str) -> bool:
        return bool(getattr(text, name, None))

    can_resume = is_recurrent(config) and model_class is not None and has_recurrent_layers(model_class)
    # Many recurrent models wrongly claim that their attention cannot be replaced: loading tests this.
    can_replace = can_resume or getattr(model_class, "_supports_attention_backend", False)
    reasons = {
        "it is no causal language model": config.is_encoder_decoder or model_class is None,
        "its recurrent state cannot be rolled back to an earlier token": is_recurrent(config) and not can_resume,
        "its sparse attention keeps an index that cannot be rolled back": has("index_topk"),
        "its sparse attention chooses keys by their content": has("keep_window_size"),
        "it is an encoder": type(config) in MODEL_FOR_MASKED_LM_MAPPING,
        "its attention is not plain causal attention": has("alibi")
        or not getattr(text, "is_causal", True)
        or getattr(text, "use_bidirectional_attention", None) in (True, "all"),
        "its attention cannot be replaced": not can_replace,
    }
    return [reason for reason, holds in reasons.items() if holds]


def quantization_of(config: Any) -> Any:
    """A configuration's quantization settings; None without any."""
    own = getattr(config, "quantization_config", None)
    return own or getattr(config.get_text_config(decoder=True), "quantization_config", None)
