"""Random weights in the sizes of public models, and a tokenizer for them: costs are measured without a checkpoint.

Nothing is downloaded. A shape is a configuration; its weights are drawn where they stay, in the dtype they
stay in, and the same seed gives the same weights on one device. The tokenizer takes any vocabulary; the
text of an id is its number.

References:
    The config.json and parameter counts of these model cards: HuggingFaceTB/SmolLM2-135M, meta-llama/Llama-3.2-1B,
    meta-llama/Llama-3.2-3B, meta-llama/Llama-3.1-8B, meta-llama/Llama-3.1-70B, Qwen/Qwen3-0.6B, Qwen/Qwen3-8B.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from amusd.config import ModelShape
from amusd.models.cached_model import CachedModel
from amusd.models.configuration import ModelConfig
from amusd.models.decoder import weight_shapes
from amusd.models.huggingface import device_errors, prepare, wrap_weights
from amusd.models.load_options import LoadOptions, loaded_dtype
from amusd.models.tokenizer import Conversation
from amusd.models.vocabulary import EMBEDDING, HEAD


def _llama(hidden: int, intermediate: int, layers: int, heads: int, *, factor: float, tied: bool) -> dict[str, Any]:
    """The Llama 3.1 and 3.2 family; `factor` stretches the rotary frequencies."""
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0}
    return {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {**rope, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        "tie_word_embeddings": tied,
    }


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    """The dense Qwen3 family."""
    return {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": tied,
    }


_SMOLLM2_135M = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
}
_LLAMA_70B = _llama(8192, 28672, 80, 64, factor=8.0, tied=False)

SHAPES: Mapping[ModelShape, Mapping[str, Any]] = MappingProxyType(
    {
        "smollm2-135m": _SMOLLM2_135M,
        "smollm2-135m-slice": {**_SMOLLM2_135M, "num_hidden_layers": 3},
        "llama-1b": _llama(2048, 8192, 16, 32, factor=32.0, tied=True),
        "llama-3b": _llama(3072, 8192, 28, 24, factor=32.0, tied=True),
        "llama-8b": _llama(4096, 14336, 32, 32, factor=8.0, tied=False),
        "llama-70b": _LLAMA_70B,
        "llama-70b-slice": {**_LLAMA_70B, "num_hidden_layers": 8},
        "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
        "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
    }
)
"""The settings of each shape's configuration. A `slice` has a tenth of the layers, whole embeddings."""

SMALLER: Mapping[ModelShape, ModelShape] = MappingProxyType(
    {
        "smollm2-135m": "smollm2-135m-slice",
        "smollm2-135m-slice": "smollm2-135m-slice",
        "llama-1b": "smollm2-135m",
        "llama-3b": "llama-1b",
        "llama-8b": "llama-1b",
        "llama-70b": "llama-1b",
        "llama-70b-slice": "llama-1b",
        "qwen3-0.6b": "smollm2-135m",
        "qwen3-8b": "qwen3-0.6b",
    }
)
"""The shape that drafts for a target of each shape unless another one is named."""

_PIECES = re.compile(r" [1-9]?[0-9]{1,8}(?![^ ])|.", re.DOTALL)
"""A number as `decode` writes it, or any other character."""


def load_synthetic(shape: ModelShape, options: LoadOptions, *, seed: int = 0) -> CachedModel:
    """A model of this shape with random weights. Beside these, memory holds at most one layer and the embeddings again.

    Each of several ranks draws the whole model before it keeps its share. Raises `ConfigError` without that device, or
    when it is too small.
    """
    config = ModelConfig(SHAPES[shape])
    prepare(config, options)
    with device_errors(options.device):
        weights = random_weights(config, dtype=loaded_dtype(options.dtype), device=options.device, seed=seed)
    return wrap_weights(weights, config, options)


def random_weights(config: ModelConfig, *, dtype: torch.dtype, device: str, seed: int) -> dict[str, Tensor]:
    """The weights of a model, by name, drawn on `device` in `dtype`. A tied weight has two names.

    A product of a normed row has numbers around 1 at every width, so eighty layers stay far from the limits of float16.
    The layers outweigh the embedding, so an answer is not one token repeated.
    """
    torch.empty(0, device=device)  # a device that is not there says so here more plainly than in the next line
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


class SyntheticTokenizer:
    """A `Tokenizer` whose every id reads as its number behind a space, whatever stands beside it.

    `encode` gives such numbers their ids back, and other text an id for each byte, so its text is not what was encoded.
    """

    def __init__(self, vocab_size: int) -> None:
        """Ids are in `[0, vocab_size)`."""
        self._vocab_size = vocab_size
        self.eos_token_ids: frozenset[int] = frozenset()  # an answer ends at its length, or at a stop string
        self.fingerprint = hashlib.sha256(f"amusd synthetic {vocab_size}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """One id for each number that `decode` writes, one for each byte of anything else."""
        ids: list[int] = []
        for piece in _PIECES.findall(text):
            if len(piece) > 1 and int(piece) < self._vocab_size:
                ids.append(int(piece))
            else:
                ids.extend(byte % self._vocab_size for byte in piece.encode(errors="replace"))
        return ids

    def encode_chat(self, turns: Conversation, **_options: Any) -> list[int]:
        """Token ids of the contents, an empty line between them: there is no template."""
        return self.encode("\n\n".join(turn["content"] for turn in turns))

    def decode(self, token_ids: Iterable[int]) -> str:
        """The numbers one after the other. Raises `ValueError` on an id out of range."""
        ids = list(token_ids)
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            raise ValueError(f"a token id is out of range: between 0 and {self._vocab_size - 1} allowed")
        return "".join(f" {token_id}" for token_id in ids)

    def token_text(self, token_id: int) -> bytes:
        """The number of one id, with its space."""
        return self.decode([token_id]).encode()
