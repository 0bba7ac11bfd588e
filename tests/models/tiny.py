"""Small random checkpoints of many architectures, built without a download."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from amusd.checkpoints.building import prepared
from amusd.checkpoints.configuration import as_own
from amusd.checkpoints.decoder_weights import load_decoder
from amusd.checkpoints.transformers_models import HuggingFaceNetwork
from amusd.models.attention import register_attention
from amusd.models.numerics import Numerics
from amusd.runner.load_options import LoadOptions
from amusd.runner.model_runner import ModelRunner

VOCAB = 97
MAX_LENGTH = 256
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": MAX_LENGTH,
}  # fmt: skip
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_CHUNKS = {
    "attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
}  # fmt: skip
_SHARED_LAYERS = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": _WINDOWS["layer_types"] * 2,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
}  # fmt: skip
_GPT2_SIZES = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": MAX_LENGTH}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_LATENT = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaConfig": _SIZES,
    "Qwen2Config": _SIZES,
    "Qwen3Config": {**_SIZES, "head_dim": 16},
    "MistralConfig": {**_SIZES, "sliding_window": 4096},
    "GemmaConfig": {**_SIZES, "head_dim": 16},
    "Gemma2Config": {**_SIZES, "head_dim": 16, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 1},
    "Gemma3TextConfig": {**_SIZES, **_WINDOWS, "head_dim": 16},
    "Gemma4TextConfig": {**_SIZES, **_WINDOWS, **_SHARED_LAYERS, "head_dim": 16, "global_head_dim": 32},
    "NemotronConfig": _SIZES,
    "Olmo3Config": {**_SIZES, **_WINDOWS},
    "MinistralConfig": {**_SIZES, **_WINDOWS, "head_dim": 16},
    "Llama4TextConfig": {**_SIZES, **_EXPERTS, **_CHUNKS, "head_dim": 16, "intermediate_size_mlp": 32},
    "Qwen2MoeConfig": {
        **_SIZES, **_WINDOWS, **_EXPERTS, "use_sliding_window": True, "num_experts": 4, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "Phi3Config": _SIZES,
    "GPTNeoXConfig": {**_SIZES, "num_key_value_heads": 4},
    "GPT2Config": _GPT2_SIZES,
    "GraniteConfig": {**_SIZES, "logits_scaling": 2.0},
    "Qwen3MoeConfig": {**_SIZES, **_EXPERTS, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 16},
    "GptOssConfig": {**_SIZES, **_WINDOWS, **_EXPERTS, "head_dim": 16, "rope_parameters": _ROPE},
    "DeepseekV3Config": {**_SIZES, **_LATENT, "num_key_value_heads": 4, "moe_intermediate_size": 16},
}  # fmt: skip


def tiny_config(name: str = "LlamaConfig", **changes: Any) -> Any:
    return getattr(transformers, name)(**{**_SPECIAL, **ARCHITECTURES[name], **changes})


def tiny_causal_lm(config: Any, attention: str = "eager", seed: int = 0) -> Any:
    """A stock model whose weights are large enough for every part of it to show in the logits."""
    torch.manual_seed(seed)
    make = transformers.AutoModelForCausalLM.from_config
    model = make(copy.deepcopy(config), attn_implementation=attention, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2, generator=generator)
    return model


def weights_of(model: Any) -> dict[str, Tensor]:
    own = {parameter: parameter.detach() for parameter in model.parameters()}
    return {name: own[parameter] for name, parameter in model.named_parameters(remove_duplicate=False)}


def wrap_model(
    model: Any, options: LoadOptions, output_ids: Tensor | None = None, weights: dict[str, Tensor] | None = None
) -> ModelRunner:
    """Ours with the weights and the dtype of a stock model; `weights`: instead of its own."""
    config = as_own(model.config)
    if options.model_impl == "transformers" or config is None:
        with prepared(model.config, options) as length:
            return ModelRunner(HuggingFaceNetwork(model, options), options, length, output_ids)
    options = replace(options, dtype=str(model.dtype).removeprefix("torch."))
    with prepared(config, options) as length:
        network = load_decoder(weights or weights_of(model), config, options, length)
        return ModelRunner(network, options, length, output_ids)


def wrapped_pair(name: str, numerics: Numerics | None = None, **options: Any) -> tuple[Any, ModelRunner]:
    """A stock model and ours; `options`: as of `LoadOptions`."""
    config = tiny_config(name)
    stock, ours = tiny_causal_lm(config), tiny_causal_lm(config, register_attention())
    ours.load_state_dict(stock.state_dict())
    numerics = numerics or Numerics(width=8, fixed=True, prefill_chunk=32)
    return stock, wrap_model(ours, LoadOptions(numerics=numerics, max_model_len=MAX_LENGTH, **options))


def byte_tokenizer(added: tuple[str, ...] = ("<eos>",), chat_template: str | None = None) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(added))
    names = {"eos_token": added[0], "chat_template": chat_template}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def save_checkpoint(folder: Path, config: Any, tokenizer: Any | None = None) -> Any:
    model = tiny_causal_lm(config)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return model
