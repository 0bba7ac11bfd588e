"""A small target and a draft that is often right, as checkpoints with a tokenizer and random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from amusd.checkpoints.checkpoint import write_checkpoint
from amusd.checkpoints.configuration import ModelConfig
from amusd.checkpoints.synthetic import random_weights

VOCAB_SIZE = 512
NOISE = 0.05
"""Size of the noise in the draft's weights, relative to the target's weights."""
_SHAPE = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def save_small_pair(folder: Path) -> tuple[Path, Path]:
    """Write both in float32; returns the folders of target and draft."""
    weights = random_weights(ModelConfig(**_SHAPE), dtype=torch.float32, device="cpu", seed=5)
    _save(weights, folder / "target")
    generator = torch.Generator().manual_seed(6)
    for weight in weights.values():
        if weight.ndim > 1:
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=NOISE * float(weight.std()))
    _save(weights, folder / "draft")
    return folder / "target", folder / "draft"


def _save(weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    folder.mkdir(parents=True)
    write_checkpoint(folder, _SHAPE, weights)
    _tokenizer().save_pretrained(folder)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({f"w{number}": number for number in range(VOCAB_SIZE)}, unk_token="w0")  # noqa: S106 - a word
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    )
