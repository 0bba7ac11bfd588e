"""Configurations of models, read by transformers; its import takes a second, which a checkpoint of our own saves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from amusd.errors import ConfigError
from amusd.models.checkpoint import CONFIG, find_checkpoint, one_line_errors, read_json

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
PLAIN = "amusd"
"""Key in a `config.json` that states all of `ModelConfig`, beside a tokenizer that needs no transformers either."""


class ModelConfig(SimpleNamespace):
    """Configuration of a model that `Decoder` computes, under transformers' names."""

    def get_text_config(self, *, decoder: bool = True) -> ModelConfig:  # noqa: ARG002 - the signature is transformers'
        """Itself."""
        return self

    def standardize_rope_params(self) -> None:
        """Nothing to do; transformers' formulas call it."""


def load_config(path: str | Path, num_layers: int | None = None, model_impl: str = "auto") -> Any:
    """Load a checkpoint's configuration, cut to its first `num_layers` layers if given.

    A `ModelConfig` exactly if `Decoder` computes the model. Raises `ConfigError` without one, or for too many layers.
    """
    folder = find_checkpoint(path)
    settings = read_json(path, folder, CONFIG)
    with one_line_errors(path, CONFIG):
        if PLAIN in settings and model_impl != "transformers":
            config: Any = ModelConfig(**settings)
        else:
            from amusd.models.adapter import load_stock_config

            config = load_stock_config(folder)
            if model_impl != "transformers":
                config = as_own(config) or config
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


def as_own(stock: Any) -> ModelConfig | None:
    """A configuration of transformers as a `ModelConfig`; None if `Decoder` does not compute the model."""
    is_covered = (
        stock.model_type in MODEL_TYPES
        and getattr(stock, "quantization_config", None) is None
        and stock.hidden_act in ("silu", "swish")
        and stock.rope_parameters.get("partial_rotary_factor", 1.0) == 1.0
    )
    if not is_covered:
        return None
    settings = stock.to_dict()
    settings["head_dim"] = settings.get("head_dim") or stock.hidden_size // stock.num_attention_heads
    return ModelConfig(**settings)
