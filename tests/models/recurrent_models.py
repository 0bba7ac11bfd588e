"""Tiny random models with recurrent layers, of transformers and ours, and noisy twins to draft for them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from models import tiny
from torch import Tensor

from amusd.models.attention import register_attention
from amusd.models.numerics import Numerics
from amusd.runner.load_options import LoadOptions
from amusd.runner.model_runner import ModelRunner

VOCAB = tiny.VOCAB
MAX_LENGTH = 700
_SIZES = {**tiny._SIZES, **tiny._SPECIAL, "num_hidden_layers": 3, "max_position_embeddings": MAX_LENGTH}
_LAYERS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_DELTA = {
    **_LAYERS, "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_expand": 2,
    "mamba_chunk_size": 64,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", _DELTA),
    "qwen3_next": ("Qwen3NextConfig", {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16}),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **_LAYERS, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
            "v_head_dim": 8, "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 16,
            "linear_attn_config": {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4},
        },
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"]}),
    "falcon_h1": ("FalconH1Config", {**_MAMBA, "mamba_d_ssm": 64, "head_dim": 8, "num_hidden_layers": 2}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {**_LAYERS, **_MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
            "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 8, "head_dim": 8,
            "chunk_size": 64,
        },
    ),
    "bamba": ("BambaConfig", {**_MAMBA, "attn_layer_indices": [1]}),
}  # fmt: skip
JAMBA = (
    "JambaConfig",
    {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
)


def config_of(name: str, **changes: Any) -> Any:
    kind, own = JAMBA if name == "jamba" else RECURRENT[name]
    return getattr(transformers, kind)(**{**_SIZES, **own, **changes})


@functools.cache
def stock_model(name: str) -> Any:
    return tiny.tiny_causal_lm(config_of(name))


def noisy_model(name: str, noise: float = 0.0, attention: str = "eager", **changes: Any) -> Any:
    """A model of transformers with the weights of `stock_model`, and `noise` in them. `changes`: to its config."""
    model = tiny.tiny_causal_lm(config_of(name, **changes), attention)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noisy = noise * parameter.std(correction=0) * torch.randn(parameter.shape, generator=generator)
            parameter.add_(noisy)
    return model


def our_model(name: str, noise: float = 0.0, model: Any = None, **options: Any) -> ModelRunner:
    """Ours with the weights of `model`, by default those of `noisy_model`."""
    model = noisy_model(name, noise, register_attention()) if model is None else model
    numerics = Numerics.for_device(options.get("device", "cpu"), width=8, fixed=False)
    return tiny.wrap_model(model, LoadOptions(numerics=numerics, max_model_len=MAX_LENGTH, **options))


def stock_logits(name: str, token_ids: Sequence[int]) -> Tensor:
    """[tokens, vocab]: transformers' own, in one pass."""
    with torch.inference_mode():
        logits: Tensor = stock_model(name)(torch.tensor([[*token_ids]])).logits[0]
    return logits


def check_greedy(name: str, prompt: Sequence[int], answer: Sequence[int]) -> None:
    """Each token is the likeliest one by transformers, or within 0.001 of it."""
    logits = stock_logits(name, [*prompt, *answer])[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor([[token] for token in answer])).squeeze(1)
    assert (logits.max(1).values - chosen).max() < 1e-3, (prompt, answer)
