"""Decides from a model's configuration alone whether this package can run it: reads no weight.

A model is refused if its cache could not be cut back to an earlier token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from amusd.errors import UnsupportedModelError
from amusd.models.configuration import MODEL_TYPES, ModelConfig

_STATELESS_LAYERS = frozenset({"full_attention", "moe", "mlp"})
_WINDOW_OF_LAYER = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_ROPE_TYPES = frozenset({"default", "linear", "dynamic", "yarn", "longrope", "llama3"})


def why_not_covered(config: Any) -> str | None:
    """Why `Decoder` does not compute the model of a transformers configuration; None if it does."""
    if config.model_type not in MODEL_TYPES:
        return f"only the model types {', '.join(sorted(MODEL_TYPES))} have a lean decoder"
    if is_quantized(config):
        return "its checkpoint is quantized"
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}, not silu"
    if getattr(config, "pretraining_tp", 1) not in (None, 1):
        return f"its weights are sliced (pretraining_tp={config.pretraining_tp})"
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type not in _ROPE_TYPES:
        return f"its rotary embedding is of type {rope_type}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "it rotates a part of each head only"
    return None


def check_supported(config: Any, max_model_len: int) -> None:
    """Raise `UnsupportedModelError`, naming model type and reason, for a model that this package cannot run."""
    for reason in _reasons(config, max_model_len):
        raise UnsupportedModelError(f"model type '{config.model_type}' is not supported: {reason}")


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


def _reasons(config: Any, max_model_len: int) -> Iterator[str]:
    text = config.get_text_config(decoder=True)
    if not isinstance(config, ModelConfig):
        yield from _stock_reasons(config, text)
    layer_types = getattr(text, "layer_types", None) or []
    for layer_type in sorted(set(layer_types) - _STATELESS_LAYERS - _WINDOW_OF_LAYER.keys()):
        yield f"the state of its {layer_type} layers cannot be rolled back to an earlier token"
    yield from _window_reasons(text, layer_types, max_model_len)


def _stock_reasons(config: Any, text: Any) -> Iterator[str]:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder; a causal language model is needed"
    if model_class is None:
        yield "transformers has no causal language model for it"
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


def is_quantized(config: Any) -> bool:
    """Whether a transformers configuration, or its text model's, says that the checkpoint is quantized."""
    parts = (config, config.get_text_config(decoder=True))
    return any(getattr(part, "quantization_config", None) is not None for part in parts)
