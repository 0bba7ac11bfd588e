"""Try a tiny random model of every causal architecture of the installed transformers.

    python experiments/architectures/run.py --out experiments/architectures/results/table.json

Each is loaded as a target. If it loads, it decodes in ragged blocks with rollbacks; the logits are compared with those
of transformers' own forward pass, and with those of passes over one token.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from amusd.checkpoints.building import load_model
from amusd.checkpoints.configuration import check_supported
from amusd.checkpoints.transformers_models import quiet_transformers
from amusd.errors import AmusdError, first_line
from amusd.models.numerics import Numerics
from amusd.models.passes import Rows
from amusd.runner.load_options import LoadOptions
from amusd.runner.model_runner import ModelRunner
from amusd.runner.self_test import BLOCK_LENGTHS, measure_width_invariance

LENGTH, PROMPT, VOCAB = 96, 40, 97
TOLERANCE = 2e-3
SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "lru_width", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "decoder_ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len"), 256),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), 8),
    "hidden_size_per_layer_input": 8,
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "kv_channels", "attention_head_dim"), 16),
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "layer_types": None, "mlp_layer_types": None,
}  # fmt: skip
_PAIRS = ["sliding_attention", "full_attention"] * 2
_HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_expand": 2, "mamba_n_groups": 1}
OWN: Mapping[str, Mapping[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2},
    "cohere_compass_text": {"layer_types": _PAIRS},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "gemma3n_text": {"layer_types": _PAIRS, "num_kv_shared_layers": 2},
    "gemma4_text": {"num_kv_shared_layers": 2, "layer_types": _PAIRS},
    "gemma4_unified_text": {"layer_types": _PAIRS},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"] * 2},
    "helium": {"head_dim": 8},
    "kimi_linear": {"num_attention_heads": 2, "num_key_value_heads": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1},
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": _HYBRID,
    "qwen3_next": _HYBRID,
    "zamba": {"num_hidden_layers": 12, "mamba_dt_rank": 4},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, **_MAMBA},
    "zaya": {"num_experts_per_tok": 1},
}
"""Settings of a type beside `SIZES`, or in their place."""


def main() -> int:
    """Try all types, or those named; write and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="model types; none: all")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    table = {}
    for config_class in sorted(MODEL_FOR_CAUSAL_LM_MAPPING, key=lambda each: str(each.model_type)):
        name = config_class.model_type
        if not arguments.names or name in arguments.names:
            table[name] = outcome(config_class)
            print(f"{name:<24} {table[name]}", flush=True)
    for what in sorted(set(table.values())):
        print(f"| {what} | {', '.join(name for name in table if table[name] == what)} |")
    if arguments.out is not None:
        document = {"transformers": transformers.__version__, "torch": torch.__version__, "outcomes": table}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def outcome(config_class: Any) -> str:
    """The outcome for a tiny model: `bits`, `rounding`, `refused: ...`, `wrong: ...` or `not tried: ...`."""
    with quiet_transformers():
        try:
            config = tiny_config(config_class)
        except Exception as error:  # noqa: BLE001 - a configuration raises what it likes
            return f"not tried: {first_line(error)}"
        try:
            check_supported(config)
        except AmusdError as error:
            return f"refused: {str(error).partition('is not supported: ')[2]}"
        try:
            stock = random_model(config)
        except Exception as error:  # noqa: BLE001
            return f"not tried: {first_line(error)}"
        return _compared(stock)


def tiny_config(config_class: Any) -> Any:
    """A configuration with the sizes of `SIZES`, also in its part for text."""
    stated = config_class()
    known = {*stated.to_dict(), *config_class.attribute_map, "num_key_value_heads"}
    fixed = {name for name in dir(config_class) if isinstance(getattr(config_class, name), property)}
    settable = {name for name in known if config_class.attribute_map.get(name, name) not in fixed}
    sizes = {name: value for name, value in SIZES.items() if name in settable}
    if "layer_types" in config_class.attribute_map:  # derived from other settings
        sizes.pop("layer_types", None)
    if "kv_lora_rank" in sizes:  # every head has keys of its own, whose size is a sum
        sizes |= {"num_key_value_heads": 4}
        sizes.pop("head_dim", None)
    for name in ("text_config", "decoder"):
        if hasattr(part := getattr(stated, name, None), "to_dict"):
            sizes[name] = tiny_config(type(part)).to_dict()
    return config_class(**{**sizes, **OWN.get(config_class.model_type, {})})


def random_model(config: Any) -> Any:
    """A model of transformers whose weights are large enough for every part to show in the logits."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    return model


def _compared(stock: Any) -> str:
    token_ids = torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    rule = Numerics(width=8, fixed=True, prefill_chunk=32)
    with tempfile.TemporaryDirectory() as folder:
        try:
            stock.save_pretrained(folder)  # some types load weights that they have not saved
            stock = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
            with torch.inference_mode():
                expected = stock.eval()(torch.tensor([token_ids]), use_cache=False).logits[0]
        except Exception as error:  # noqa: BLE001
            return f"not tried: {first_line(error)}"
        try:
            options = LoadOptions(numerics=rule, max_model_len=200, dtype="float32")
            model = load_model(folder, options)
            found, tolerance = decoded(model, token_ids), TOLERANCE * max(1.0, float(expected.abs().max()))
            difference = float((found - expected[PROMPT:]).abs().max())
            if difference > tolerance:  # for some models, transformers decodes otherwise than its forward pass computes
                difference = float((found - decoded_by(stock, token_ids)).abs().max())
            invariant = not any(measure_width_invariance(model, token_ids[:PROMPT], 16))
        except Exception as error:  # noqa: BLE001
            line = first_line(error).replace(folder, "...")
            return f"refused: {line.rpartition('not supported: ')[2]}"
    if not difference < tolerance:
        return f"wrong: logits differ by {difference:.2g}"
    return f"{'bits' if invariant else 'rounding'}, computed by {model.implementation}"


def decoded(model: ModelRunner, token_ids: list[int]) -> Tensor:
    """[tokens, vocab] behind `PROMPT`, from ragged blocks with wrong candidates that are rolled back."""
    cache, rows, number = model.new_cache(LENGTH + 8), list[Tensor](), 0
    model.prefill(token_ids[:PROMPT], cache)
    while (start := cache.length) < len(token_ids):
        most = model.numerics.max_rows(start)
        right = token_ids[start:][: min(most, BLOCK_LENGTHS[number % len(BLOCK_LENGTHS)])]
        wrong = [(start + row) % VOCAB for row in range(min(most - len(right), number % 3))]
        rows.append(model.run([Rows([*right, *wrong], cache)])[0].logits[: len(right)].clone())
        cache.truncate(start + len(right))
        number += 1
    return torch.cat(rows)


def decoded_by(stock: Any, token_ids: list[int]) -> Tensor:
    """The same logits by transformers, one token at a time."""
    with torch.inference_mode():
        output, rows = stock(torch.tensor([token_ids[:PROMPT]]), use_cache=True), list[Tensor]()
        for token_id in token_ids[PROMPT:]:
            output = stock(torch.tensor([[token_id]]), past_key_values=output.past_key_values, use_cache=True)
            rows.append(output.logits[0])
    return torch.cat(rows)


if __name__ == "__main__":
    sys.exit(main())
