"""Checkpoint folders of drafters in their published layouts: `config.json` and `model.safetensors`."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from networks import BLOCK_SIZE, NUM_MEDUSA_HEADS, layer_ids
from safetensors.torch import save_file
from torch import Tensor, nn

_LLAMA_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "hidden_act",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def drafter_config(arguments: argparse.Namespace, target: Any) -> Any:
    """The network's sizes: the target's, with fewer layers and a key head for every query head."""
    config = copy.deepcopy(target)
    config.num_target_layers = target.num_hidden_layers
    config.num_hidden_layers = arguments.layers if arguments.method == "dflash" else 1
    config.num_key_value_heads = config.num_attention_heads
    config.mask_token_id = arguments.mask_token
    return config


def write_drafter(folder: Path, method: str, config: Any, network: nn.Module, head: Tensor, output_ids: Tensor) -> None:
    """Write both files, each whole or not at all. `head` is the target's; `output_ids` are in ascending order."""
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in network.state_dict().items()}
    if method == "eagle3":
        tensors |= reduced_vocabulary(head, output_ids)
    if method == "medusa":
        tensors |= {f"{number}.1.weight": head.clone() for number in range(NUM_MEDUSA_HEADS)}
    partial = folder / "partial.safetensors"
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, partial)
    partial.rename(folder / "model.safetensors")
    fields = _fields(method, config, len(output_ids))
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def reduced_vocabulary(head: Tensor, output_ids: Tensor) -> dict[str, Tensor]:
    """EAGLE-3's head: token d2t[i] + i of the target is number i of the drafter; t2d says which tokens it has."""
    has = torch.zeros(len(head), dtype=torch.bool, device=head.device)
    has[output_ids] = True
    offsets = output_ids - torch.arange(len(output_ids), device=output_ids.device)
    return {"lm_head.weight": head[output_ids].clone(), "d2t": offsets, "t2d": has}


def _fields(method: str, config: Any, num_output_ids: int) -> dict[str, Any]:
    if method == "medusa":
        return {
            "medusa_num_heads": NUM_MEDUSA_HEADS,
            "medusa_num_layers": 1,
            "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
        }
    fields = {name: getattr(config, name) for name in _LLAMA_FIELDS}
    fields |= {"head_dim": config.hidden_size // config.num_attention_heads, "attention_bias": False}
    fields |= {"rope_theta": config.rope_parameters["rope_theta"], "tie_word_embeddings": False, "dtype": "bfloat16"}
    layers = layer_ids(config.num_target_layers)[:3]
    if method == "eagle3":
        fields |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
        return fields | {"draft_vocab_size": num_output_ids, "target_hidden_size": config.hidden_size}
    if method == "eagle1":
        return fields | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "bias": False}
    return fields | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": BLOCK_SIZE,
        "num_target_layers": config.num_target_layers,
        # the output of layer i is the state before layer i + 1
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": [i - 1 for i in layers]},
    }
