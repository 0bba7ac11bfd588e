"""A model shared between ranks against the whole one: the same logits to rounding, the same bits on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import tiny
from models.blocks import check_logits, decode_in_blocks, random_ids, stock_logits
from models.linked_ranks import on_ranks
from models.test_decoder import CASES, LENGTH, PROMPT, Case, lean_model, stock_model
from passes import prefilled
from torch import Tensor

from amusd.checkpoints.building import load_model
from amusd.errors import ConfigError
from amusd.models.features import FeatureSpec
from amusd.models.numerics import Numerics
from amusd.models.sharding import Ranks
from amusd.runner import process_group
from amusd.runner.load_options import LoadOptions

FOUR_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
SHARED = {
    "grouped heads": CASES["grouped heads"],
    "llama's biases": CASES["llama biases"],
    "qwen2": CASES["qwen2 biases without that of the output"],
    "qwen3": Case("Qwen3Config"),
    "qwen3 with biases": CASES["qwen3 attention_bias"],
    "odd sizes": Case("LlamaConfig", {**FOUR_HEADS, "intermediate_size": 51, "head_dim": 10, "vocab_size": tiny.VOCAB}),
}


def decoded(stock: Any, ranks: Ranks, token_ids: list[int]) -> Tensor:
    model = lean_model(stock, ranks=ranks)
    return decode_in_blocks(model, token_ids, prefilled(model, token_ids[:PROMPT], LENGTH))


@pytest.mark.parametrize(("name", "size"), [*((name, 2) for name in SHARED), ("llama's biases", 3), ("odd sizes", 4)])
def test_the_ranks_together_compute_what_the_whole_model_does(name: str, size: int, tmp_path: Path) -> None:
    case = SHARED[name]
    if size > 2:
        case = Case(case.config, {**case.changes, **FOUR_HEADS})
    stock, token_ids = stock_model(case), random_ids(LENGTH)
    logits = on_ranks(tmp_path, size, lambda ranks: decoded(stock, ranks, token_ids))
    check_logits(logits[0], stock_logits(stock, token_ids)[PROMPT:], least_std=0.5)
    assert all(torch.equal(other, logits[0]) for other in logits[1:]), "the ranks' bits differ"


def test_prompts_added_up_in_shares_have_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, token_ids = stock_model(SHARED["qwen3"]), random_ids(LENGTH)
    layers = (1, stock.config.num_hidden_layers)
    features = {"eagle": FeatureSpec(layers, len(layers) * stock.config.hidden_size)}

    def computed(ranks: Ranks) -> tuple[Tensor, Tensor]:
        model = lean_model(stock, ranks=ranks, features=features)
        cache = prefilled(model, token_ids[:PROMPT], LENGTH)
        return decode_in_blocks(model, token_ids, cache), model.read_features([(cache, range(PROMPT))])[0]

    found = []
    for many in (10**9, 5):
        monkeypatch.setattr(process_group, "MANY_ROWS", many)
        (tmp_path / str(many)).mkdir()
        found += on_ranks(tmp_path / str(many), 2, computed)
    for logits, states in found[1:]:
        assert torch.equal(logits, found[0][0])
        assert torch.equal(states, found[0][1])


@pytest.mark.parametrize(
    ("name", "changes", "model_impl", "size", "message"),
    [
        ("LlamaConfig", {}, "auto", 3, "each rank needs a key head; allowed: 1 to 2"),
        ("Qwen3Config", {"num_key_value_heads": 1}, "amusd", 2, "each rank needs a key head; allowed: 1 to 1"),
        ("LlamaConfig", {}, "transformers", 2, "ranks share amusd's decoder, not transformers' code; allowed: 1 to 1"),
        ("GemmaConfig", {}, "auto", 2, "ranks share amusd's decoder, not transformers' code; allowed: 1 to 1"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_weights_are_read(
    tmp_path: Path, name: str, changes: dict[str, Any], model_impl: str, size: int, message: str
) -> None:
    tiny.tiny_config(name, **changes).save_pretrained(tmp_path)  # there are no weights at all
    numerics, ranks = Numerics(width=8, fixed=True), Ranks(0, size)
    with pytest.raises(ConfigError, match=rf"^target_tensor_parallel_size={size}: .*{message}"):
        load_model(tmp_path, LoadOptions(numerics=numerics, max_model_len=64, model_impl=model_impl, ranks=ranks))
