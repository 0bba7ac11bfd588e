"""A pair of small random checkpoints, and the answer that they are to give."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from models import tiny

from amusd.engine import Engine
from launch.compose import compose_config

PROMPT = "a sentence"


def save_pair(folder: Path) -> list[str]:
    """Write a small random target of two key heads, and a smaller draft; return the arguments that name them."""
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    for name, layers in (("target", 2), ("draft", 1)):
        tokenizer = tiny.byte_tokenizer(chat_template=template)
        config = tiny.tiny_config(
            "Qwen3Config",
            vocab_size=len(tokenizer),
            num_hidden_layers=layers,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            eos_token_id=None,
            pad_token_id=None,
        )
        tiny.save_checkpoint(folder / name, config, tokenizer)
    return arguments_of(folder)


def arguments_of(folder: Path) -> list[str]:
    models = ["target=hf", f"target.model={folder / 'target'}", "drafter=hf", f"drafter.model={folder / 'draft'}"]
    dtypes = ["target.dtype=float32", "drafter.dtype=float32"]
    return [*models, *dtypes, "max_model_len=256", "hardware=cpu", "sampling.ignore_eos=true"]


def plain_answer(pair: Sequence[str], num_tokens: int) -> tuple[int, ...]:
    config = compose_config([*pair, "mode=autoregressive"])
    with Engine.start(dataclasses.replace(config.engine(), drafters=())) as engine:
        params = dataclasses.replace(config.sampling, max_new_tokens=num_tokens)
        return engine.generate(PROMPT, params, decoding=config.decoding()).token_ids
