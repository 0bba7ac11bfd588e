"""Configurations of models: read here if `Decoder` computes them, else by transformers, which takes two seconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from amusd.errors import ConfigError
from amusd.models.checkpoint import CONFIG, find_checkpoint, one_line_errors, read_json

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})

_ROPE_TYPES = frozenset({"default", "linear", "dynamic", "yarn", "longrope", "llama3"})
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_DEFAULTS: dict[str, Any] = {
    "attention_bias": False,
    "head_dim": None,
    "hidden_act": "silu",
    "layer_types": None,
    "max_position_embeddings": 2048,
    "max_window_layers": 28,
    "mlp_bias": False,
    "num_key_value_heads": None,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}


class ModelConfig(SimpleNamespace):
    """Configuration of a model of `MODEL_TYPES`, under transformers' names."""

    num_key_value_heads: Any
    head_dim: Any
    layer_types: Any
    sliding_window: Any

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings`: a `config.json` of any age. Raises `TypeError` for a missing or malformed size."""
        older = {name: settings.get(name) for name in ("rope_scaling", "rope_theta", "partial_rotary_factor")}
        super().__init__(**_DEFAULTS | {name: each for name, each in settings.items() if name not in older})
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
        rope = dict(older["rope_scaling"] or settings.get("rope_parameters") or {})
        rope.setdefault("rope_type", rope.get("type", "default"))
        rope.setdefault("rope_theta", older["rope_theta"] or 10000.0)
        if older["partial_rotary_factor"] is not None:
            rope.setdefault("partial_rotary_factor", older["partial_rotary_factor"])
        if rope["rope_type"] in ("llama3", "yarn", "longrope"):
            rope.setdefault("original_max_position_embeddings", self.max_position_embeddings)
        self.rope_parameters = rope

    def is_covered(self) -> bool:
        """Whether `Decoder` computes the model."""
        return (
            getattr(self, "quantization_config", None) is None
            and self.hidden_act in ("silu", "swish")
            and self.pretraining_tp in (None, 1)
            and self.rope_parameters["rope_type"] in _ROPE_TYPES
            and self.rope_parameters.get("partial_rotary_factor", 1.0) == 1.0
        )

    def get_text_config(self, *, decoder: bool = True) -> ModelConfig:  # noqa: ARG002 - the signature is transformers'
        """Itself."""
        return self

    def standardize_rope_params(self) -> None:
        """Nothing to do; transformers' formulas call it."""


def load_config(path: str | Path, num_layers: int | None = None, model_impl: str = "auto") -> Any:
    """Load a checkpoint's configuration, cut to its first `num_layers` layers if given.

    A `ModelConfig` exactly if `Decoder` computes the model. Raises `ConfigError` without one, for too many layers, or
    where `model_impl=amusd` does not cover it.
    """
    folder = find_checkpoint(path)
    settings = read_json(path, folder, CONFIG)
    with one_line_errors(path, CONFIG):
        model_type = settings.get("model_type")
        is_own = model_impl != "transformers" and model_type in MODEL_TYPES
        config: Any = ModelConfig(settings) if is_own else None
        if config is None or not config.is_covered():
            if model_impl == "amusd":
                raise ConfigError(
                    f"model_impl=amusd: this model of type '{model_type}' is not one that amusd's decoder computes: "
                    f"{', '.join(sorted(MODEL_TYPES))} with their usual layers, not quantized; allowed: auto"
                )
            from amusd.models.adapter import load_stock_config

            config = load_stock_config(folder)
    if num_layers is not None:
        text = config.get_text_config(decoder=True)
        most = text.num_hidden_layers - 1
        if num_layers > most:
            raise ConfigError(
                f"drafter.num_layers={num_layers}: the target has {most + 1} layers; allowed: 1 to {most}"
            )
        text.num_hidden_layers = num_layers
        if layer_types := getattr(text, "layer_types", None):
            text.layer_types = layer_types[:num_layers]
    return config
