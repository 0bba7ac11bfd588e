"""Small random checkpoints with the keys of published config.json files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from models import tiny
from models.test_decoder import fill_vectors
from safetensors.torch import load_file, save_file

ORIGINAL = 64
_SIZES = {key: value for key, value in tiny._SIZES.items() if key != "max_position_embeddings"}
_LLAMA = {
    **_SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "transformers_version": "4.43.0",
    "bos_token_id": 1, "eos_token_id": [2, 3], "hidden_act": "silu", "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
}  # fmt: skip
_QWEN2 = {
    **_SIZES, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "torch_dtype": "bfloat16",
    "attention_dropout": 0.0, "hidden_act": "silu", "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "max_position_embeddings": ORIGINAL, "max_window_layers": 2, "sliding_window": 131072,
    "tie_word_embeddings": False, "use_sliding_window": False,
}  # fmt: skip
_YARN = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}
_LLAMA3 = {"high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": ORIGINAL}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "Llama 3.1": {
        **_LLAMA, "max_position_embeddings": 8 * ORIGINAL, "tie_word_embeddings": False,
        "rope_scaling": {**_LLAMA3, "factor": 8.0, "rope_type": "llama3"},
    },
    "Llama 3.2": {
        **_LLAMA, "head_dim": 8, "max_position_embeddings": 8 * ORIGINAL, "tie_word_embeddings": True,
        "rope_scaling": {**_LLAMA3, "factor": 32.0, "rope_type": "llama3"},
    },
    "Qwen2.5 with yarn": {**_QWEN2, "rope_scaling": {**_YARN, "type": "yarn"}},
    "Qwen3 with yarn": {
        **_QWEN2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
        "head_dim": 16, "rope_scaling": {**_YARN, "rope_type": "yarn"}, "sliding_window": None,
        "tie_word_embeddings": True,
    },
    "Vicuna 16k": {
        **_LLAMA, "max_position_embeddings": ORIGINAL, "rope_scaling": {"factor": 4.0, "type": "linear"},
        "rope_theta": 10000.0, "tie_word_embeddings": False,
    },
    "Mistral": {
        **_LLAMA, "architectures": ["MistralForCausalLM"], "max_position_embeddings": 32768, "model_type": "mistral",
        "sliding_window": None, "tie_word_embeddings": False,
    },
}  # fmt: skip


def write(folder: Path, config: Mapping[str, Any], *, shard: str = "1GB") -> Any:
    """Write a checkpoint in shards of this size; returns the model."""
    model = fill_vectors(tiny.tiny_causal_lm(transformers.AutoConfig.for_model(**config)))
    model.save_pretrained(folder, max_shard_size=shard)
    write_config(folder, config)
    return model


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def damage_weights(folder: Path) -> None:
    """Make every weight NaN."""
    file = folder / "model.safetensors"
    weights = {name: torch.full_like(weight, torch.nan) for name, weight in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def change_weights(file: Path, **changes: torch.Tensor | None) -> None:
    weights = load_file(file)
    for name, tensor in changes.items():
        weights.pop(name.replace("__", "."), None)
        if tensor is not None:
            weights[name.replace("__", ".")] = tensor
    save_file(weights, file, metadata={"format": "pt"})
