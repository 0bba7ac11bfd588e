"""Medusa and DFlash drafters in the layouts in which they are published, against the formulas of the papers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import tiny
from models.blocks import check_logits
from models.test_eagle import (
    DRAFT_IDS,
    LAYERS,
    OPTIONS,
    SIZES,
    WIDTH,
    ReferenceLayer,
    Weights,
    layer_weights,
    norm,
    random,
    save,
    save_eagle3,
    shared_weights,
)
from torch import Tensor

from amusd.checkpoints.draft_layouts import read_published
from amusd.checkpoints.draft_networks import BlockModel, load_published
from amusd.errors import ConfigError

NUM_HEADS, BLOCK, MASK = 3, 5, 90


def medusa_weights(num_blocks: int = 1, *, equal_heads: bool = False) -> Weights:
    weights: Weights = {}
    for head in range(NUM_HEADS):
        for block in range(num_blocks):
            weights[f"{head}.{block}.linear.weight"] = random(WIDTH, WIDTH, seed=10 * head + block)
            weights[f"{head}.{block}.linear.bias"] = random(WIDTH, seed=100 + 10 * head + block)
        weights[f"{head}.{num_blocks}.weight"] = random(tiny.VOCAB, WIDTH, seed=200 + (0 if equal_heads else head))
    return weights


def save_medusa(folder: Path, weights: Weights, file: str = "medusa_lm_head.pt") -> Path:
    return save(folder, weights, file, medusa_num_heads=2, medusa_num_layers=1, base_model_name_or_path="any")


def medusa_scores(weights: Weights, state: Tensor, num_blocks: int = 1) -> Tensor:
    rows = []
    for head in range(NUM_HEADS):
        row = state
        for block in range(num_blocks):
            inner = weights[f"{head}.{block}.linear.weight"] @ row + weights[f"{head}.{block}.linear.bias"]
            row = row + inner * inner.sigmoid()
        rows.append(weights[f"{head}.{num_blocks}.weight"] @ row)
    return torch.stack(rows)


def dflash_weights() -> Weights:
    weights: Weights = {
        "fc.weight": random(WIDTH, 2 * WIDTH, seed=70),
        "hidden_norm.weight": random(WIDTH, seed=71),
        "norm.weight": random(WIDTH, seed=72),
    }
    for index in range(2):
        layer = layer_weights(f"layers.{index}", WIDTH, head_norms=True)
        weights |= {name: tensor * (1 - 0.1 * index) for name, tensor in layer.items()}
    return weights


def save_dflash(folder: Path, weights: Weights | None = None, **changes: Any) -> Path:
    settings = {
        **SIZES, "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3", "head_dim": 8, "layer_types": ["full_attention"] * 2, "num_target_layers": LAYERS,
        "dflash_config": {"target_layer_ids": [1, 4], "mask_token_id": MASK}, "block_size": BLOCK,
    }  # fmt: skip
    return save(folder, dflash_weights() if weights is None else weights, **{**settings, **changes})


def dflash_scores(
    weights: Weights,
    shared: Weights,
    features: dict[int, Tensor],
    position: int,
    token_id: int,
    skipped: int = 1,
    window: int = 1000,
) -> Tensor:
    """`window`: for features of all positions before."""
    embedding = shared["model.embed_tokens.weight"]
    block = [embedding[token_id], *[embedding[MASK]] * (BLOCK - 1)]
    for index in range(2):
        layer = ReferenceLayer(weights, f"layers.{index}")
        for place, feature in features.items():
            layer.placed(feature, place)
        first_norm = layer.at("input_layernorm")
        queries = [layer.placed(norm(row, first_norm), position + depth) for depth, row in enumerate(block)]
        firsts = [max(0, position + depth + 1 - window) for depth in range(BLOCK)]
        block = [layer.mixed(*each) for each in zip(block, queries, firsts, strict=True)]
    head = weights.get("lm_head.weight", shared["lm_head.weight"])
    return torch.stack([head @ norm(row, weights["norm.weight"]) for row in block])[skipped:]


@pytest.mark.parametrize(
    ("file", "num_blocks", "equal_heads"),
    [("medusa_lm_head.pt", 1, False), ("medusa_lm_head.safetensors", 0, False), ("model.safetensors", 2, True)],
)
def test_medusa_gives_the_scores_of_the_paper(
    file: str, num_blocks: int, equal_heads: bool, target: Path, tmp_path: Path
) -> None:
    weights = medusa_weights(num_blocks, equal_heads=equal_heads)
    folder = save_medusa(tmp_path / "draft", weights, file)
    spec = read_published(folder, target, "medusa").features
    assert (spec.layers, spec.width, spec.weights) == ((LAYERS,), WIDTH, {})
    model = load_medusa(folder, target)
    assert model.max_depth == NUM_HEADS, "counted from the weights"
    state, features = model.new_state(), random(6, WIDTH, seed=1)
    state.take(0, features)
    check_logits(state.score(6, 5), medusa_scores(weights, features[5], num_blocks))


def test_the_further_heads_of_medusa_go_on_after_an_older_state(target: Path, tmp_path: Path) -> None:
    weights = medusa_weights()
    model = load_medusa(save_medusa(tmp_path / "draft", weights), target)
    state, features = model.new_state(), random(9, WIDTH, seed=1)
    assert len(state.score(0, 5)) == 0
    state.take(0, features[:6])
    expected = medusa_scores(weights, features[5])
    check_logits(state.score(7, 5), expected[1:])
    check_logits(state.score(8, 5), expected[2:])
    assert len(state.score(9, 5)) == 0
    state.take(6, features[6:])
    state.take(1, features[1:3])  # late, and of no use
    check_logits(state.score(9, 5), medusa_scores(weights, features[8]))
    state.truncate(0)
    assert len(state.score(9, 5)) == 0


def load_medusa(folder: Path, target: Path) -> BlockModel:
    return load_published(folder, target, OPTIONS, "medusa")


def load_dflash(folder: Path, target: Path) -> BlockModel:
    return load_published(folder, target, OPTIONS, "dflash")


def test_dflash_gives_the_scores_of_the_paper(target: Path, tmp_path: Path) -> None:
    weights, shared = dflash_weights(), shared_weights(target)
    folder = save_dflash(tmp_path / "draft", weights)
    spec = read_published(folder, target, "dflash").features
    assert (spec.layers, spec.width) == ((2, 5), WIDTH), "it names layers whose outputs it reads"
    states = random(30, 2 * WIDTH, seed=1)
    features = spec.reduce(states)
    torch.testing.assert_close(features, norm(states @ weights["fc.weight"].T, weights["hidden_norm.weight"]))
    model = load_dflash(folder, target)
    assert model.max_depth == BLOCK - 1
    state = model.new_state()
    state.take(0, features[:7])
    check_logits(state.score(7, 40), dflash_scores(weights, shared, dict(enumerate(features[:7])), 7, 40))
    state.take(7, features[7:10])  # where the block was
    check_logits(state.score(10, 41), dflash_scores(weights, shared, dict(enumerate(features[:10])), 10, 41))
    state.take(10, features[10:27])
    check_logits(state.score(27, 42), dflash_scores(weights, shared, dict(enumerate(features[:27])), 27, 42))


@pytest.mark.parametrize("key", ["sliding_window", "swa_window_size"])
def test_dflash_sees_through_its_windows(key: str, target: Path, tmp_path: Path) -> None:
    weights, shared, features = dflash_weights(), shared_weights(target), random(20, WIDTH, seed=1)
    settings: dict[str, Any] = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}
    if key == "swa_window_size":
        settings["dflash_config"] = {**_NESTED, "swa_window_size": 12}
    state = load_dflash(
        save_dflash(tmp_path / "draft", weights, **{"sliding_window": 12, **settings}), target
    ).new_state()
    state.take(0, features)
    expected = dflash_scores(weights, shared, dict(enumerate(features)), 20, 40, window=12)
    check_logits(state.score(20, 40), expected)


def test_dflash_sees_neither_features_that_have_not_come_nor_those_written_over(target: Path, tmp_path: Path) -> None:
    weights, shared, features = dflash_weights(), shared_weights(target), random(14, WIDTH, seed=1)
    state = load_dflash(save_dflash(tmp_path / "draft", weights), target).new_state()
    assert len(state.score(4, 40)) == 0
    state.take(0, features[:3])
    state.take(5, features[5:])
    known = {place: features[place] for place in (0, 1, 2, 5, 6, 7)}
    check_logits(state.score(8, 40), dflash_scores(weights, shared, known, 8, 40))
    known |= {place: features[place] for place in range(8 + BLOCK, 14)}
    check_logits(state.score(14, 40), dflash_scores(weights, shared, known, 14, 40))
    state.truncate(0)
    assert len(state.score(10, 40)) == 0


@pytest.mark.parametrize("from_anchor", [False, True])
def test_dflash_in_speculators_form_may_have_a_head_of_its_own(from_anchor: bool, target: Path, tmp_path: Path) -> None:
    weights = dflash_weights() | {
        "lm_head.weight": random(len(DRAFT_IDS), WIDTH, seed=53),
        "d2t": DRAFT_IDS - torch.arange(len(DRAFT_IDS)),
    }
    settings = {
        "speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [1, 4], "sample_from_anchor": from_anchor,
        "transformer_layer_config": {**SIZES, "model_type": "qwen3", "head_dim": 8},
        "mask_token_id": MASK, "block_size": BLOCK, "draft_vocab_size": 12,
    }  # fmt: skip
    folder, features = save(tmp_path / "draft", weights, **settings), random(6, WIDTH, seed=1)
    assert read_published(folder, target, "dflash").features.layers == (1, 4)
    model = load_dflash(folder, target)
    assert model.output_ids.tolist() == DRAFT_IDS.tolist()
    state, skipped = model.new_state(), 0 if from_anchor else 1
    assert model.max_depth == BLOCK - skipped
    state.take(0, features)
    expected = dflash_scores(weights, shared_weights(target), dict(enumerate(features)), 6, 40, skipped)
    check_logits(state.score(6, 40), expected)


_NESTED = {"target_layer_ids": [1, 4], "mask_token_id": MASK}
DFLASH_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no mask": ({"dflash_config": {"target_layer_ids": [1, 4]}}, "mask_token_id=None; allowed: 0 to 96"),
    "windows without a width": ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window=None"),
    "no list of layers": ({"dflash_config": {"mask_token_id": MASK}}, "lacks dflash_config.target_layer_ids"),
    "two lists": ({"aux_hidden_state_layer_ids": [1, 5]}, "layers that it reads more than once"),
    "a layer that is no number": ({"dflash_config": {**_NESTED, "target_layer_ids": [1, "4"]}}, "a list of numbers"),
    "nested causal": ({"dflash_config": {**_NESTED, "is_causal": True}}, "is_causal=True is not supported; allowed: F"),
}


@pytest.mark.parametrize("name", DFLASH_REFUSED)
def test_dflash_drafters_that_do_not_fit_are_refused(name: str, target: Path, tmp_path: Path) -> None:
    settings, message = DFLASH_REFUSED[name]
    with pytest.raises(ConfigError, match=message) as caught:
        load_dflash(save_dflash(tmp_path / "draft", **settings), target)
    assert "\n" not in f"{caught.value}"


def test_a_drafter_of_another_kind_is_refused(target: Path, tmp_path: Path) -> None:
    folder = save_eagle3(tmp_path / "draft")
    with pytest.raises(ConfigError, match=r"drafter=dflash .*draft: config.json: lacks dflash_config.target_layer_ids"):
        load_dflash(folder, target)
    with pytest.raises(ConfigError, match=r"drafter=medusa .*draft: its file has weights without a place, d2t among"):
        read_published(folder, target, "medusa")
