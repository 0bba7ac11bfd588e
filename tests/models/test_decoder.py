"""The lean decoder against transformers' own code: every feature that it claims, each on weights that show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from models import tiny
from models.blocks import BUCKETED, FIXED, check_logits, decode_in_blocks, random_ids, stock_logits
from models.tiny import weights_of, wrap_model
from passes import forward, prefilled

from amusd.checkpoints.vocabulary import reduce_head
from amusd.models.attention import register_attention
from amusd.models.numerics import Numerics
from amusd.runner.graphs import run_each_time
from amusd.runner.load_options import LoadOptions
from amusd.runner.model_runner import ModelRunner

CAPTURED = Numerics(width=8, fixed=True, has_borders=False, prefill_chunk=32)
LENGTH = 110
PROMPT = 73
VISIBLE = 0.05


def rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4, **parameters}}


def longrope() -> dict[str, Any]:
    """Short factors that grow from one frequency to the next; long ones that no tested length may show."""
    factors = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [50.0] * 4}
    original = {"original_max_position_embeddings": tiny.MAX_LENGTH}
    return {**rope("longrope", **factors, **original), "max_position_embeddings": 4 * tiny.MAX_LENGTH}


@dataclass(frozen=True)
class Case:
    config: str
    changes: Mapping[str, Any] = field(default_factory=dict)


UNEVEN = {"hidden_size": 39, "num_attention_heads": 3, "num_key_value_heads": 1}
UNEVEN |= {"intermediate_size": 51, "head_dim": 10}
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128)
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}

CASES = {
    "grouped heads": Case("LlamaConfig", {"num_key_value_heads": 2}),
    "ungrouped heads": Case("LlamaConfig", {"num_key_value_heads": 4}),
    "one key head": Case("LlamaConfig", {"num_key_value_heads": 1}),
    "tied head": Case("LlamaConfig", {"tie_word_embeddings": True}),
    "head_dim above hidden / heads": Case("LlamaConfig", {"head_dim": 24}),
    "head_dim below hidden / heads": Case("Qwen3Config", {"head_dim": 6}),
    "sizes that are no multiples of 16": Case("LlamaConfig", UNEVEN),
    "norm epsilon": Case("Qwen3Config", {"rms_norm_eps": 0.5}),
    "llama biases": Case("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "qwen2 biases without that of the output": Case("Qwen2Config"),
    "qwen3 attention_bias": Case("Qwen3Config", {"attention_bias": True}),
    "mistral with a window": Case("MistralConfig", {"sliding_window": 20}),
    "windows of some layers": Case(
        "Qwen3Config", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    ),
    "a window that llama has not": Case("LlamaConfig", {"sliding_window": 8}),
    "default rope, other theta": Case("LlamaConfig", rope("default", rope_theta=30.0)),
    "linear rope": Case("LlamaConfig", rope("linear", factor=4.0)),
    "dynamic rope": Case("LlamaConfig", rope("dynamic", factor=4.0)),
    "yarn rope": Case("Qwen2Config", rope("yarn", **YARN)),
    "yarn rope's factor of attention": Case("LlamaConfig", rope("yarn", **YARN, attention_factor=1.4, truncate=False)),
    "longrope": Case("MistralConfig", longrope()),
    "llama3 rope": Case("LlamaConfig", LLAMA3),
}


ON_GPUS = ["grouped heads", "qwen2 biases without that of the output", "head_dim below hidden / heads", "llama3 rope"]
ON_GPUS += ["windows of some layers"]


def fill_vectors(model: Any) -> Any:
    """Norm weights that are not one, and biases that are not zero; those of query and key differ."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" in name:
                parameter.uniform_(0.4, 1.8, generator=generator)
            elif parameter.ndim == 1:
                parameter.normal_(std=0.5, generator=generator)
    return model


def stock_model(case: Case) -> Any:
    return fill_vectors(tiny.tiny_causal_lm(tiny.tiny_config(case.config, **case.changes)))


def lean_model(
    stock: Any, numerics: Numerics = FIXED, change: Any = id, output_ids: torch.Tensor | None = None, **options: Any
) -> ModelRunner:
    """The decoder with the weights of `stock`; `change` is applied to the transformers model that it is made of.

    `options`: as of `LoadOptions`.
    """
    source = tiny.tiny_causal_lm(stock.config, register_attention())
    source.load_state_dict(stock.state_dict())
    change(source)
    weights = weights_of(source)
    if output_ids is not None:
        reduce_head(weights, output_ids)
    loading = LoadOptions(numerics=numerics, max_model_len=tiny.MAX_LENGTH, model_impl="amusd", **options)
    model = wrap_model(source, loading, output_ids, weights)
    assert model.implementation == "amusd"
    return model


@pytest.mark.parametrize(
    ("name", "is_captured"),
    [*((name, False) for name in CASES), *((name, True) for name in ON_GPUS)],
)
def test_ragged_blocks_with_rollbacks_agree_with_the_stock_forward(name: str, is_captured: bool) -> None:
    stock = stock_model(CASES[name])
    model = lean_model(stock, CAPTURED, capture=run_each_time) if is_captured else lean_model(stock)
    token_ids = random_ids(LENGTH)
    found = decode_in_blocks(model, token_ids, prefilled(model, token_ids[:PROMPT], LENGTH))
    check_logits(found, stock_logits(stock, token_ids)[PROMPT:], least_std=0.5)


@pytest.mark.parametrize("name", ["dynamic rope", "longrope"])
def test_sequences_end_where_the_frequencies_switch(name: str) -> None:
    stock = stock_model(CASES[name])
    source = tiny.tiny_causal_lm(stock.config, register_attention())
    model = wrap_model(source, LoadOptions(numerics=FIXED, max_model_len=2 * tiny.MAX_LENGTH, model_impl="amusd"))
    assert model.max_length == tiny.MAX_LENGTH
    token_ids = random_ids(tiny.MAX_LENGTH + 1)
    before, after = stock_logits(stock, token_ids[:-1]), stock_logits(stock, token_ids)[:-1]
    assert (before - after).abs().max() > VISIBLE, "the frequencies do not switch here"


@pytest.mark.parametrize("bias", [False, True], ids=["tied", "untied with a bias"])
def test_a_reduced_head_scores_the_tokens_it_names(bias: bool) -> None:
    stock = stock_model(Case("LlamaConfig", {"tie_word_embeddings": not bias}))
    output_ids = torch.tensor([1, 2, 5, 11, 30, 31, 96])
    offsets = torch.randn(tiny.VOCAB, generator=torch.Generator().manual_seed(1)) if bias else torch.zeros(tiny.VOCAB)

    def change(source: Any) -> None:
        if bias:
            source.lm_head.bias = torch.nn.Parameter(offsets)

    model = lean_model(stock, change=change, output_ids=output_ids)
    token_ids = random_ids(LENGTH)
    cache = prefilled(model, token_ids[:PROMPT], LENGTH)
    expected = (stock_logits(stock, token_ids) + offsets)[PROMPT:, output_ids]
    torch.testing.assert_close(decode_in_blocks(model, token_ids, cache), expected, atol=1e-4, rtol=1e-4)
    cache.truncate(PROMPT)
    chosen = forward(model, token_ids[PROMPT : PROMPT + 4], cache).choose()
    assert output_ids[chosen].tolist() == output_ids[expected[:4].argmax(dim=-1)].tolist()


def test_no_key_beyond_those_announced_is_read() -> None:
    model = lean_model(stock_model(CASES["grouped heads"]))
    token_ids = random_ids(44)
    fresh, poisoned = (prefilled(model, token_ids[:40], 100) for _ in range(2))
    with torch.inference_mode():  # where the memory was allocated
        for tensor in poisoned.memory._tensors.values():
            tensor[:, 64:] = torch.nan  # 64: the border of the block below
    expected = forward(model, token_ids[40:], fresh).logits
    assert torch.equal(forward(model, token_ids[40:], poisoned).logits, expected)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"numerics": FIXED}) for name in tiny.ARCHITECTURES),
        *((name, {"numerics": BUCKETED}) for name in tiny.ARCHITECTURES),
        ("DeepseekV3Config", {"numerics": CAPTURED, "capture": run_each_time}),  # whose values are narrow
    ],
)
def test_blocks_that_transformers_computes_agree_with_the_stock_forward(name: str, options: dict[str, Any]) -> None:
    stock, model = tiny.wrapped_pair(name, model_impl="transformers", **options)
    assert model.implementation == "transformers"
    token_ids = random_ids(110)
    found = decode_in_blocks(model, token_ids, prefilled(model, token_ids[:41], 110))
    check_logits(found, stock_logits(stock, token_ids)[41:], tolerance=1e-3)


def test_the_last_position_of_a_full_cache_can_be_computed_with_padding() -> None:
    stock, model = tiny.wrapped_pair("GPT2Config")  # its position table has no row beyond max_length
    token_ids = random_ids(tiny.MAX_LENGTH)
    cache = prefilled(model, token_ids[:-1], tiny.MAX_LENGTH)
    expected = stock_logits(stock, token_ids)[-1:]
    torch.testing.assert_close(forward(model, token_ids[-1:], cache).logits, expected, atol=1e-3, rtol=1e-3)
