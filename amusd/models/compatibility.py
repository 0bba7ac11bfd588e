"""Decides from a configuration whether a model can be run, with a cache that can be cut back, and how far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from amusd.errors import ConfigError
from amusd.models.configuration import ModelConfig

_STATELESS_LAYERS = frozenset({"full_attention", "moe", "mlp"})
_WINDOW_OF_LAYER = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


def check_supported(config: Any, max_model_len: int, num_ranks: int = 1) -> None:
    """Raise `ConfigError`, naming type and reason, for a model that this package, or so many ranks, cannot run."""
    for reason in _reasons(config, max_model_len):
        raise ConfigError(f"model type '{config.model_type}' is not supported: {reason}")
    is_lean = isinstance(config, ModelConfig)
    most = config.num_key_value_heads if is_lean else 1
    if num_ranks > most:
        reason = "each rank needs a key head" if is_lean else "ranks share amusd's decoder, not transformers' code"
        raise ConfigError(f"target_tensor_parallel_size={num_ranks}: {reason}; allowed: 1 to {most}")


def position_limit(config: Any) -> int | None:
    """Longest sequence whose keys do not depend on its length; None if unknown.

    With `linear` and `yarn` most configurations give the trained length and some the stretched one; their original
    length tells which.
    """
    text = config.get_text_config(decoder=True)
    longest = getattr(text, "max_position_embeddings", None) or 0
    limits = []
    for rope in _rope_parameters(text):
        kind, original = rope.get("rope_type"), rope.get("original_max_position_embeddings")
        if kind in ("linear", "yarn"):
            longest = max(longest, int((original or longest) * (rope.get("factor") or 1)))
        elif kind in ("dynamic", "longrope"):
            # They switch their frequencies in mid-sequence, when the keys already cached cannot follow.
            limits += [original, getattr(text, "original_max_position_embeddings", None)]
    return min((limit for limit in [longest, *limits] if limit), default=None)


def _reasons(config: Any, max_model_len: int) -> Iterator[str]:
    text = config.get_text_config(decoder=True)
    if not isinstance(config, ModelConfig):
        yield from _stock_reasons(config, text)
    layer_types = set(getattr(text, "layer_types", None) or ())
    for layer_type in sorted(layer_types - _STATELESS_LAYERS - _WINDOW_OF_LAYER.keys()):
        yield f"the state of its {layer_type} layers cannot be rolled back to an earlier token"
    for layer_type, attribute in _WINDOW_OF_LAYER.items():
        window = getattr(text, attribute, None)
        used = layer_type in layer_types or not layer_types
        if used and window is not None and window < max_model_len:
            yield (
                f"its window of {window} tokens overwrites what a rollback needs beyond that length; "
                f"max_model_len={max_model_len} must be at most {window}"
            )


def _stock_reasons(config: Any, text: Any) -> Iterator[str]:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if config.is_encoder_decoder or model_class is None:
        yield "it is no causal language model"
    if getattr(model_class, "_is_stateful", False):
        yield "its recurrent state cannot be rolled back to an earlier token"
    if getattr(text, "num_kv_shared_layers", 0) or getattr(text, "kv_sharing_modes", None):
        yield "its layers share keys and values"
    if getattr(text, "index_topk", None):
        yield "its sparse attention keeps an index that cannot be rolled back"
    if getattr(text, "alibi", False) or not getattr(text, "is_causal", True):
        yield "its attention is not plain causal attention"
    if not getattr(model_class, "_supports_attention_backend", False):
        yield "transformers does not let its attention be replaced"


def _rope_parameters(text: Any) -> Iterator[Mapping[str, Any]]:
    parameters = getattr(text, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        yield parameters
    yield from (entry for entry in parameters.values() if isinstance(entry, Mapping))


def quantization_of(config: Any) -> Any:
    """A configuration's quantization settings; None without any."""
    own = getattr(config, "quantization_config", None)
    return own or getattr(config.get_text_config(decoder=True), "quantization_config", None)
