"""Checkpoints in FP8 as they are published: what they compute, alone and shared by ranks, and what they may lack."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from models.blocks import random_ids, stock_logits
from models.published import CONFIGS, write, write_config
from models.test_quantization import FP8_DYNAMIC
from models.thread_ranks import on_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor

from amusd.errors import ConfigError
from amusd.models.cached_model import CachedModel
from amusd.models.huggingface import load_model
from amusd.models.linear import to_fp8
from amusd.models.load_options import LoadOptions
from amusd.models.numerics import Numerics
from amusd.models.sharding import ALONE, Ranks


def save_fp8(folder: Path, config: str = "Llama 3.1") -> Path:
    """Write a checkpoint as llm-compressor publishes it, and its twin in bfloat16 beside it; returns its folder.

    The twin has the same weights, multiplied with their scales.
    """
    settings = {**CONFIGS[config], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    fp8, twin = folder / "fp8", folder / "twin"
    for place in (fp8, twin):
        place.mkdir()
        write(place, settings, dtype=torch.bfloat16, shard="1GB")
    write_config(fp8, {**settings, "quantization_config": FP8_DYNAMIC})
    exact, stored, plain = load_file(fp8 / "model.safetensors"), {}, {}
    for name, tensor in exact.items():
        stored[name] = plain[name] = tensor
        if "_proj.weight" in name:
            values, scale = to_fp8(tensor)
            scale = scale.bfloat16()  # as they are published
            stored[name], stored[f"{name}_scale"] = values, scale
            plain[name] = (values.float() * scale.float()).bfloat16()
    save_file(stored, fp8 / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, twin / "model.safetensors", metadata={"format": "pt"})
    return fp8


ONE_AT_A_TIME = threading.Lock()
"""transformers changes torch's defaults while it makes a model."""


def load(folder: Path, dtype: str = "bfloat16", ranks: Ranks = ALONE) -> CachedModel:
    rule = Numerics(width=8, fixed=True, border=32, prefill_chunk=32)
    with ONE_AT_A_TIME:
        return load_model(folder, LoadOptions(numerics=rule, max_model_len=128, dtype=dtype, ranks=ranks))


def logits_of(model: CachedModel, token_ids: list[int]) -> Tensor:
    cache = model.new_cache(len(token_ids))
    return torch.cat([model.forward(token_ids[at : at + 8], cache).logits for at in range(0, len(token_ids), 8)])


class Rounded(torch.nn.Module):
    """The product as it is defined, of rows that are rounded in `parts`."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None, parts: int) -> None:
        super().__init__()
        self._weight, self._bias, self._parts = weight.float() * scale.float(), bias, parts

    def forward(self, rows: Tensor) -> Tensor:
        rounded = [values.float() * scales for values, scales in map(to_fp8, rows.chunk(self._parts, dim=-1))]
        return torch.nn.functional.linear(torch.cat(rounded, dim=-1), self._weight, self._bias)


def defined_model(fp8: Path, parts: int = 1) -> Callable[[list[int]], Tensor]:
    """Logits of transformers' own model in float32 whose products are the defined ones; `parts`: ranks that sum up."""
    stock = transformers.AutoModelForCausalLM.from_pretrained(fp8.parent / "twin", dtype=torch.float32).eval()
    stored = load_file(fp8 / "model.safetensors")
    for name, module in list(stock.named_modules()):
        if f"{name}.weight_scale" in stored:
            sums = parts if name.endswith(("o_proj", "down_proj")) else 1
            weight, scale = stored[f"{name}.weight"], stored[f"{name}.weight_scale"]
            stock.set_submodule(name, Rounded(weight, scale, module.bias, sums))
    return partial(stock_logits, stock)


def short_answers(logits_of_one: Callable[[list[int]], Tensor]) -> Tensor:
    """[sequences, logits] of short ones, whose numbers do not reach each other."""
    return torch.stack([logits_of_one(random_ids(4, seed)).flatten().float() for seed in range(16)])


def distances(found: Tensor, expected: Tensor) -> Tensor:
    """[rows]: root of the mean square of the difference, in standard deviations of `expected`."""
    return (found.float() - expected).square().mean(dim=1).sqrt() / expected.std()


CLOSE = 1e-4
"""Of float32 sums in another order. Where one falls on the other side of a step of FP8, a sequence differs by more."""
COARSE = 0.25
"""Of rows rounded to FP8 in these models, whose random weights are large: trained ones do not add up so much."""
FAMILIES = ["Llama 3.1", "Qwen2.5 with yarn", "Qwen3 with yarn"]


@pytest.mark.parametrize("config", FAMILIES)
def test_a_checkpoint_in_fp8_computes_the_defined_products(config: str, tmp_path: Path) -> None:
    fp8 = save_fp8(tmp_path, config)
    model = load(fp8, "float32")
    assert model.implementation == "amusd"
    found, expected = short_answers(partial(logits_of, model)), short_answers(defined_model(fp8))
    assert distances(found, expected).median() < CLOSE
    assert distances(short_answers(defined_model(fp8, parts=2)), expected).median() > 100 * CLOSE, "this would not show"


@pytest.mark.parametrize("config", FAMILIES)
def test_it_says_what_its_twin_in_bfloat16_says(config: str, tmp_path: Path) -> None:
    fp8, token_ids = save_fp8(tmp_path, config), random_ids(96)
    found, expected = (logits_of(load(folder), token_ids).float() for folder in (fp8, tmp_path / "twin"))
    assert 0.001 < distances(found, expected).median() < COARSE
    chosen, best = found.argmax(dim=1), expected.max(dim=1)
    assert (chosen == best.indices).float().mean() > 0.6
    behind = best.values - expected.gather(1, chosen.unsqueeze(1)).squeeze(1)
    assert behind.quantile(0.9) < 2 * COARSE * expected.std()


def test_blocks_do_not_change_its_bits(tmp_path: Path) -> None:
    model, token_ids = load(save_fp8(tmp_path)), random_ids(24)
    cache = model.new_cache(24)
    one_by_one = torch.cat([model.forward([token_id], cache).logits for token_id in token_ids])
    assert torch.equal(logits_of(model, token_ids), one_by_one)


@pytest.mark.parametrize("config", ["Llama 3.1", "Qwen2.5 with yarn"])
def test_ranks_share_it_with_scales_for_their_part_of_a_row(config: str, tmp_path: Path) -> None:
    fp8 = save_fp8(tmp_path, config)
    found = on_ranks(2, lambda ranks: short_answers(partial(logits_of, load(fp8, "float32", ranks))))
    assert torch.equal(found[0], found[1])
    assert distances(found[0], short_answers(defined_model(fp8, parts=2))).median() < CLOSE


def test_a_head_in_fp8_runs_too(tmp_path: Path) -> None:
    fp8, token_ids = save_fp8(tmp_path), random_ids(16)
    before = logits_of(load(fp8, "float32"), token_ids)
    file = fp8 / "model.safetensors"
    weights = load_file(file)
    values, scale = to_fp8(weights["lm_head.weight"])
    save_file({**weights, "lm_head.weight": values, "lm_head.weight_scale": scale}, file, metadata={"format": "pt"})
    assert 0.001 < distances(logits_of(load(fp8, "float32"), token_ids), before).median() < COARSE
    shared = on_ranks(2, lambda ranks: logits_of(load(fp8, "float32", ranks), token_ids))
    assert 0.001 < distances(shared[0], before).median() < COARSE


def test_weights_in_fp8_without_scales_are_one_line(tmp_path: Path) -> None:
    fp8 = save_fp8(tmp_path)
    file, name = fp8 / "model.safetensors", "model.layers.1.mlp.up_proj.weight_scale"
    weights = load_file(file)
    scale = weights.pop(name)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"the checkpoint lacks weights, {name} among them$"):
        load(fp8)
    save_file({**weights, name: scale.reshape(1, -1)}, file, metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"up_proj.weight_scale has shape \[1, 96\], and config.json asks for \[96, 1\]"
    ):
        load(fp8)


def test_a_lacking_bias_is_not_taken_for_zero(tmp_path: Path) -> None:
    fp8 = save_fp8(tmp_path, "Qwen2.5 with yarn")
    weights = load_file(fp8 / "model.safetensors")
    del weights["model.layers.0.self_attn.q_proj.bias"]
    save_file(weights, fp8 / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks weights, model\.layers\.0\.self_attn\.q_proj\.bias among them$"):
        load(fp8)
