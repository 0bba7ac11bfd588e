"""Random weights in the sizes of public models, and a tokenizer for them, to measure costs without a checkpoint.

References: config.json and parameter counts of HuggingFaceTB/SmolLM2-135M, meta-llama/Llama-3.2-1B,
meta-llama/Llama-3.1-8B, meta-llama/Llama-3.1-70B.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from torch import Tensor

from amusd.checkpoints.building import prepared
from amusd.checkpoints.configuration import ModelConfig
from amusd.checkpoints.decoder_weights import load_decoder, weight_shapes
from amusd.checkpoints.tokenizer import Tokenizer
from amusd.checkpoints.vocabulary import EMBEDDING, HEAD
from amusd.config import ModelShape
from amusd.runner.load_options import LoadOptions, loaded_dtype
from amusd.runner.model_runner import ModelRunner


def _family(vocab_size: int, key_heads: int, positions: int, theta: float) -> Mapping[str, Any]:
    sizes = {"vocab_size": vocab_size, "num_key_value_heads": key_heads, "max_position_embeddings": positions}
    rope = {"rope_type": "default", "rope_theta": theta}
    return {"model_type": "llama", **sizes, "rms_norm_eps": 1e-5, "rope_parameters": rope}


_LLAMA3 = _family(vocab_size=128256, key_heads=8, positions=131072, theta=500000.0)
_SMOLLM2 = _family(vocab_size=49152, key_heads=3, positions=8192, theta=100000.0)


def _shape(family: Mapping[str, Any], *sizes: int, tied: bool = False) -> Mapping[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    return {**family, **dict(zip(names, sizes, strict=True)), "tie_word_embeddings": tied}


SHAPES: Mapping[ModelShape, Mapping[str, Any]] = {
    "smollm2-135m": _shape(_SMOLLM2, 576, 1536, 30, 9, 64, tied=True),
    "smollm2-135m-slice": _shape(_SMOLLM2, 576, 1536, 3, 9, 64, tied=True),
    "llama-1b": _shape(_LLAMA3, 2048, 8192, 16, 32, 64, tied=True),
    "llama-8b": _shape(_LLAMA3, 4096, 14336, 32, 32, 128),
    "llama-70b": _shape(_LLAMA3, 8192, 28672, 80, 64, 128),
    "llama-70b-slice": _shape(_LLAMA3, 8192, 28672, 8, 64, 128),
}
"""Configuration of each shape. A `slice` has a tenth of the layers and whole embeddings."""


def smaller(shape: ModelShape) -> ModelShape:
    """The default draft shape for a target of this shape."""
    if shape.startswith("smollm2"):
        return "smollm2-135m-slice"
    return "smollm2-135m" if shape == "llama-1b" else "llama-1b"


def load_synthetic(shape: ModelShape, options: LoadOptions) -> ModelRunner:
    """A model of this shape with random weights; each rank draws the whole model, then keeps its share.

    Raises `ConfigError` if the device is missing or too small.
    """
    config = ModelConfig(**SHAPES[shape])
    with prepared(config, options) as max_length:
        weights = random_weights(config, dtype=loaded_dtype(options.dtype), device=options.device, seed=0)
        return ModelRunner(load_decoder(weights, config, options, max_length), options, max_length)


def random_weights(config: ModelConfig, *, dtype: torch.dtype, device: str, seed: int) -> dict[str, Tensor]:
    """Weights by name, drawn on `device` in `dtype`. A tied weight has two names.

    Products of normed rows are around 1 at every width, so eighty layers stay within float16.
    """
    generator = torch.Generator(device).manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in weight_shapes(config).items():
        if name == HEAD and config.tie_word_embeddings:
            weights[name] = weights[EMBEDDING]
            continue
        weights[name] = torch.empty(shape, dtype=dtype, device=device)
        if len(shape) == 1:  # of a norm
            weights[name].fill_(1)
        else:  # a matrix [out, in]
            weights[name].normal_(std=shape[1] ** -0.5, generator=generator)
    return weights


class SyntheticTokenizer(Tokenizer):
    """An id's text is a space and its number."""

    def __init__(self, vocab_size: int) -> None:
        """Ids are in `[0, vocab_size)`; no id ends an answer."""
        backend = Backend(models.WordLevel({f" {number}": number for number in range(vocab_size)}))
        backend.decoder = decoders.Fuse()
        super().__init__(backend)

    def encode(self, text: str, *_arguments: Any, **_options: Any) -> list[int]:
        """The ids of a text that `decode` wrote; else one id per byte."""
        is_written = re.fullmatch(r"( [0-9]{1,9})*", text)
        numbers = map(int, text.split()) if is_written else text.encode()
        return [number % self.num_ids for number in numbers]
