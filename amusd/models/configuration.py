"""Configurations of models: read here for the types that `Decoder` computes, by transformers for every other.

transformers takes two seconds to load what it reads a configuration with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from amusd.errors import ConfigError
from amusd.models.checkpoint import CONFIG, find_checkpoint, one_line_errors

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""transformers' names of the architectures that `Decoder` computes."""

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_DEFAULTS: Mapping[str, Any] = {
    "attention_bias": False,
    "head_dim": None,
    "hidden_act": "silu",
    "layer_types": None,
    "max_position_embeddings": 2048,
    "max_window_layers": 28,
    "mlp_bias": False,
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
"""What holds where a file is silent."""


class ModelConfig(SimpleNamespace):
    """The configuration of a model that `Decoder` may compute, under transformers' names."""

    num_key_value_heads: int | None
    head_dim: int | None
    layer_types: Any
    sliding_window: Any

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings`: of a `config.json` of any age. Raises `TypeError` for a size that is missing or no number."""
        super().__init__(**{**_DEFAULTS, **settings})
        self.settings = dict(settings)
        """As they are stored."""
        for name in _SIZES:
            if not isinstance(getattr(self, name, None), int):
                raise TypeError(f"{name}={getattr(self, name, None)!r} is no number")
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.model_type.startswith("qwen"):
            window = self.sliding_window = self.sliding_window if self.use_sliding_window else None
            if self.layer_types is None:
                first = self.num_hidden_layers if window is None else self.max_window_layers
                kinds = ("full_attention", "sliding_attention")
                self.layer_types = [kinds[index >= first] for index in range(self.num_hidden_layers)]
        rope = dict(settings.get("rope_scaling") or settings.get("rope_parameters") or {})  # older files have several
        rope.setdefault("rope_type", rope.get("type", "default"))
        rope.setdefault("rope_theta", settings.get("rope_theta", 10000.0))
        if "partial_rotary_factor" in settings:
            rope.setdefault("partial_rotary_factor", settings["partial_rotary_factor"])
        if rope["rope_type"] in ("llama3", "yarn", "longrope"):
            rope.setdefault("original_max_position_embeddings", self.max_position_embeddings)
        self.rope_parameters = rope

    def get_text_config(self, *, decoder: bool = True) -> ModelConfig:  # noqa: ARG002 - the signature is transformers'
        """Itself: it has no other part."""
        return self

    def standardize_rope_params(self) -> None:
        """Nothing: they are. By transformers' name, whose formulas ask for it."""

    def of_first_layers(self, number: int) -> ModelConfig:
        """That of a model of its first `number` layers."""
        changed = {**self.settings, "num_hidden_layers": number}
        if changed.get("layer_types"):
            changed["layer_types"] = changed["layer_types"][:number]
        return ModelConfig(changed)


def load_config(path: str | Path, num_layers: int | None = None) -> Any:
    """The configuration of a checkpoint; with `num_layers`, of a model of so many of its first layers.

    A `ModelConfig`, or transformers' for another type and for quantized weights. Raises `ConfigError` if there is none,
    or it has no layers beyond those.
    """
    folder = find_checkpoint(path)
    with one_line_errors(path, CONFIG):
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if settings.get("model_type") in MODEL_TYPES and settings.get("quantization_config") is None:
            config: Any = ModelConfig(settings)
        else:
            from amusd.models.adapter import load_stock_config

            config = load_stock_config(folder)
    if num_layers is None:
        return config
    most = config.get_text_config(decoder=True).num_hidden_layers - 1
    if num_layers > most:
        raise ConfigError(f"drafter.num_layers={num_layers}: the target has {most + 1} layers; allowed: 1 to {most}")
    if isinstance(config, ModelConfig):
        return config.of_first_layers(num_layers)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = num_layers
    if layer_types := getattr(text, "layer_types", None):
        text.layer_types = layer_types[:num_layers]
    return config
