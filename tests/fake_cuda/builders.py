"""Models on fake GPUs: of public sizes, without memory for their weights, and small ones that compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from amusd.checkpoints import synthetic
from amusd.checkpoints.building import prepare_device, prepared
from amusd.checkpoints.configuration import as_own
from amusd.checkpoints.decoder_weights import load_decoder
from amusd.checkpoints.loading import DRAFT_ROWS, capture_for
from amusd.checkpoints.synthetic import SHAPES, random_weights
from amusd.checkpoints.transformers_models import HuggingFaceNetwork
from amusd.config import ModelShape
from amusd.models.attention import register_attention
from amusd.models.numerics import Numerics
from amusd.runner.load_options import LoadOptions
from amusd.runner.model_runner import ModelRunner

_SMALL = {
    "model_type": "llama", "vocab_size": 16_384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip


def build(shape: ModelShape, device: str, *, num_layers: int | None = 2, **options: Any) -> ModelRunner:
    """A model of `shape` with `num_layers` layers (None: all of them) whose passes are captured.

    `options`: as of `LoadOptions`; `width` and `fixed` in the place of `numerics`.
    """
    changes = {} if num_layers is None else {"num_hidden_layers": num_layers}
    return _wrapped({**SHAPES[shape], **changes}, device, "bfloat16", options)


def small(device: str, **options: Any) -> ModelRunner:
    """A model of two narrow layers, in float32; the same weights on every device. `options`: as of `build`."""
    return family({}, device, **options)


def family(changes: dict[str, Any], device: str, **options: Any) -> ModelRunner:
    """`small` with other settings."""
    return _wrapped({**_SMALL, **changes}, device, "float32", {"max_model_len": 256, **options})


def target(device: str = "cuda:0", **options: Any) -> ModelRunner:
    return build("llama-8b", device, **options)


def draft(device: str = "cuda:1", **options: Any) -> ModelRunner:
    return build("llama-1b", device, **as_draft(device), **options)


def as_draft(device: str) -> dict[str, Any]:
    return {"width": DRAFT_ROWS, "fixed": False, "tokens_per_step": 4 if device.startswith("cuda") else 1}


@contextmanager
def two_layers() -> Iterator[None]:
    thin = {shape: {**arguments, "num_hidden_layers": 2} for shape, arguments in SHAPES.items()}
    with mock.patch.object(synthetic, "SHAPES", thin):
        yield


def _wrapped(arguments: dict[str, Any], device: str, dtype: str, options: dict[str, Any]) -> ModelRunner:
    width, fixed = options.pop("width", 8), options.pop("fixed", True)
    settings = LoadOptions(
        **{
            "numerics": Numerics.for_device(device, width=width, fixed=fixed),
            "max_model_len": 2048,
            "dtype": dtype,
            "device": device,
            "capture": capture_for(device, cuda_graphs=True),
            **options,
        }
    )
    config = as_own(AutoConfig.for_model(**arguments))
    assert config is not None
    weights = random_weights(config, dtype=getattr(torch, dtype), device=device, seed=0)
    if config.model_type == "qwen2":
        for name in [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
            weights[name.replace("weight", "bias")] = weights[name][:, 0]
    prepare_device(device)
    if settings.model_impl != "transformers":
        with prepared(config, settings) as length:
            return ModelRunner(load_decoder(weights, config, settings, length), settings, length)
    with torch.device("meta"):
        stock = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**arguments), dtype=getattr(torch, dtype), attn_implementation=register_attention()
        )
    stock.load_state_dict(weights, assign=True)
    with torch.device(device):  # computed buffers, no weights
        stock.model.rotary_emb = type(stock.model.rotary_emb)(stock.config)
    with prepared(stock.config, settings) as length:
        return ModelRunner(HuggingFaceNetwork(stock, settings), settings, length)
