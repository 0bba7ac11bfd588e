"""Pairs of `conf/pair` over small stand-ins in the layouts of their checkpoints: composed, loaded and decoded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import tiny
from models.blocks import stock_logits
from runtime.pair import decoding, engine_of
from safetensors.torch import load_file, save_file

from amusd.checkpoints.loading import load_target
from amusd.checkpoints.transformers_models import forbid_kernels
from amusd.config import SamplingParams
from amusd.drafters.factory import load_drafters
from launch.compose import compose_config

VOCAB = 257
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
GEMMA: dict[str, Any] = {
    **SIZES, "model_type": "gemma3_text", "num_hidden_layers": 6, "query_pre_attn_scalar": 8, "sliding_window": 16,
}  # fmt: skip
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "image_token_id": 250,
    "text_config": {
        **SIZES, "model_type": "qwen3_5_text", "attn_output_gate": True, "full_attention_interval": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 8,
        "max_position_embeddings": 262144, "num_hidden_layers": 4, "vocab_size": VOCAB, "eos_token_id": 2,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25,
            "rope_theta": 10000000, "rope_type": "default",
        },
    },
    "tie_word_embeddings": False, "video_token_id": 251, "vision_end_token_id": 252, "vision_start_token_id": 253,
    "vision_config": {
        "depth": 1, "hidden_size": 16, "in_channels": 3, "intermediate_size": 16, "model_type": "qwen3_5",
        "num_heads": 2, "num_position_embeddings": 16, "out_hidden_size": 32, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen3.5-27B": QWEN,
    "Qwen/Qwen3.5-0.8B": {
        **QWEN, "tie_word_embeddings": True, "text_config": {**QWEN["text_config"], "tie_word_embeddings": True},
    },
    "google/gemma-3-27b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106],
        "boi_token_index": 253, "eoi_token_index": 254, "image_token_index": 255, "mm_tokens_per_image": 4,
        "text_config": {**GEMMA, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "vocab_size": VOCAB},
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "vision_config": {
            "hidden_size": 16, "image_size": 8, "intermediate_size": 16, "model_type": "siglip_vision_model",
            "num_attention_heads": 2, "num_hidden_layers": 1, "patch_size": 4, "vision_use_head": False,
        },
    },
    "google/gemma-3-1b-it": {
        **GEMMA, "architectures": ["Gemma3ForCausalLM"], "cache_implementation": "hybrid", "eos_token_id": [1, 106],
        "max_position_embeddings": 32768, "pad_token_id": 0, "rope_local_base_freq": 10000, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window_pattern": 6, "torch_dtype": "bfloat16", "vocab_size": VOCAB,
    },
    "openai/gpt-oss-20b": {
        **SIZES, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True,
        "eos_token_id": 2, "experts_per_token": 2, "initial_context_length": 4096, "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 131072,
        "num_hidden_layers": 2, "num_local_experts": 4, "pad_token_id": 0, "rms_norm_eps": 1e-05,
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
            "quant_method": "mxfp4", "dequantize": True,  # what happens without it, but for its need of accelerate
        },
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "sliding_window": 16, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "vocab_size": VOCAB,
    },
}  # fmt: skip


def save(folder: Path, settings: Mapping[str, Any]) -> Path:
    tokenizer = tiny.byte_tokenizer()
    assert len(tokenizer) == VOCAB
    stated = {key: value for key, value in settings.items() if key != "quantization_config"}
    torch.manual_seed(0)
    model = getattr(transformers, settings["architectures"][0])(transformers.AutoConfig.for_model(**stated))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if "quantization_config" in settings:
        pack(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def pack(file: Path) -> None:
    """Store the experts in MXFP4: two numbers a byte, and an exponent for each 32."""
    weights, generator = load_file(file), torch.Generator().manual_seed(0)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        weights[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.full(shape, 124, dtype=torch.uint8)
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize("pair", ["gemma3_27b", "gpt_oss_20b", "qwen35_27b"])
def test_a_pair_is_composed_and_gives_the_tokens_of_transformers(pair: str, tmp_path: Path) -> None:
    published = compose_config([f"pair={pair}"])
    own, folder = [f"pair={pair}", "hardware=cpu", "target.dtype=float32"], tmp_path / "target"
    save(folder, LAYOUTS[str(published.target.model)])
    if published.drafter.model is not None:
        draft = save(tmp_path / "draft", LAYOUTS[published.drafter.model])
        own += [f"drafter.model={draft}", "drafter.dtype=float32"]
    config = compose_config([*own, f"target.model={folder}", "max_model_len=128", "verify_width=bucketed"]).engine()
    forbid_kernels()
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    drafters = load_drafters(config, "cpu").factories
    single = {name: lambda make=make: make(1)[0] for name, make in drafters.items()}
    with engine_of(*load_target(config, "cpu"), single) as (engine, _):
        prompt = tuple(range(3, 60)) * 2
        params = SamplingParams(max_new_tokens=10, ignore_eos=True)
        for schedule in (decoding("autoregressive"), decoding("synchronous", 3)):
            answer = engine.generate(prompt, params, decoding=schedule)
            rows = stock_logits(stock, [*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
            chosen = rows.gather(1, torch.tensor(answer.token_ids).unsqueeze(1))
            assert (rows.amax(1, keepdim=True) - chosen).max() < 1e-3
    assert answer.metrics.num_verified > 0
