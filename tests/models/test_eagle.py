"""EAGLE drafters in the layouts in which they are published, against the formulas of the papers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from models import tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

from amusd.models.cached_model import CachedModel
from amusd.models.draft_layouts import read_feature_spec
from amusd.models.eagle import load_eagle
from amusd.models.kv_cache import KVMemory
from amusd.models.load_options import LoadOptions
from amusd.models.numerics import Numerics
from amusd.models.split_attention import SplitAttention

WIDTH, HEADS, KEY_HEADS, DIM, MLP, LAYERS = 32, 4, 2, 8, 48, 6
EPSILON = 1e-5
DRAFT_IDS = torch.tensor([3, 4, 7, 11, 20, 21, 22, 40, 41, 77, 95, 96])
SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": MLP,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "rms_norm_eps": EPSILON,
    "rope_theta": 5e5,
    "vocab_size": tiny.VOCAB,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
}
OPTIONS = LoadOptions(numerics=Numerics(width=16, fixed=False), max_model_len=128, dtype="float32")
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny.save_checkpoint(folder, tiny.tiny_config(num_hidden_layers=LAYERS, tie_word_embeddings=False))
    return folder


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * (1.0 if len(shape) == 1 else 0.2)


def layer_weights(prefix: str, inputs: int, *, head_norms: bool = False) -> Weights:
    """One decoder layer whose attention takes in `inputs` numbers."""
    shapes = {
        "self_attn.q_proj": (HEADS * DIM, inputs),
        "self_attn.k_proj": (KEY_HEADS * DIM, inputs),
        "self_attn.v_proj": (KEY_HEADS * DIM, inputs),
        "self_attn.o_proj": (WIDTH, HEADS * DIM),
        "mlp.gate_proj": (MLP, WIDTH),
        "mlp.up_proj": (MLP, WIDTH),
        "mlp.down_proj": (WIDTH, MLP),
        "input_layernorm": (WIDTH,),
        "post_attention_layernorm": (WIDTH,),
    }
    if head_norms:
        shapes |= {"self_attn.q_norm": (DIM,), "self_attn.k_norm": (DIM,)}
    names = {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}
    return {name: random(*shape, seed=seed) for seed, (name, shape) in enumerate(names.items())}


def eagle3_weights(prefix: str = "midlayer", num_states: int = 3, *, head_norms: bool = False) -> Weights:
    t2d = torch.zeros(tiny.VOCAB, dtype=torch.bool)
    t2d[DRAFT_IDS] = True
    return {
        **layer_weights(prefix, 2 * WIDTH, head_norms=head_norms),
        f"{prefix}.hidden_norm.weight": random(WIDTH, seed=50),
        "fc.weight": random(WIDTH, num_states * WIDTH, seed=51),
        "norm.weight": random(WIDTH, seed=52),
        "lm_head.weight": random(len(DRAFT_IDS), WIDTH, seed=53),
        "d2t": DRAFT_IDS - torch.arange(len(DRAFT_IDS)),
        "t2d": t2d,
    }


def save(folder: Path, weights: Weights, file: str = "model.safetensors", **settings: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    if file.endswith(".safetensors"):
        save_file(weights, folder / file)
    else:
        torch.save(weights, folder / file)
    return folder


def save_eagle3(folder: Path, weights: Weights | None = None, **changes: Any) -> Path:
    settings = {**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 12}
    return save(folder, eagle3_weights() if weights is None else weights, **{**settings, **changes})


def norm(row: Tensor, weight: Tensor) -> Tensor:
    return row / torch.sqrt((row * row).mean(-1, keepdim=True) + EPSILON) * weight


def rotated(heads: Tensor, position: int) -> Tensor:
    """[heads, dim], turned by the angles of `position`."""
    half = DIM // 2
    angles = position / SIZES["rope_theta"] ** (torch.arange(half) * 2 / DIM)
    first, second = heads[:, :half], heads[:, half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=1)


class ReferenceLayer:
    """A decoder layer, one row at a time."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str) -> None:
        self.weights, self.prefix = weights, prefix
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, residual: Tensor, inputs: Tensor, position: int) -> Tensor:
        query, key, value = (self.times(f"self_attn.{name}_proj", inputs).view(-1, DIM) for name in "qkv")
        if f"{self.prefix}.self_attn.q_norm.weight" in self.weights:
            query, key = norm(query, self.at("self_attn.q_norm")), norm(key, self.at("self_attn.k_norm"))
        self.keys.append(rotated(key, position))
        self.values.append(value)
        keys, values = (torch.stack(rows).repeat_interleave(HEADS // KEY_HEADS, 1) for rows in (self.keys, self.values))
        scores = torch.einsum("hd,nhd->hn", rotated(query, position), keys) / math.sqrt(DIM)
        mixed = torch.einsum("hn,nhd->hd", scores.softmax(-1), values).flatten()
        hidden = residual + self.times("self_attn.o_proj", mixed)
        normed = norm(hidden, self.at("post_attention_layernorm"))
        gate, up = self.times("mlp.gate_proj", normed), self.times("mlp.up_proj", normed)
        return hidden + self.times("mlp.down_proj", gate.sigmoid() * gate * up)

    def at(self, name: str) -> Tensor:
        return self.weights[f"{self.prefix}.{name}.weight"]

    def times(self, name: str, row: Tensor) -> Tensor:
        product = self.at(name) @ row
        bias = self.weights.get(f"{self.prefix}.{name}.bias")
        return product if bias is None else product + bias


def eagle3_logits(
    weights: Weights, embedding: Tensor, features: Tensor, tokens: list[int], prefix: str = "midlayer", **flags: bool
) -> Tensor:
    """Row t reads token t and feature t - 1: one of `features`, and behind those what row t - 1 gave."""
    count = 1 + max((int(name.split(".")[1]) for name in weights if name.startswith("layers.")), default=0)
    layers = [ReferenceLayer(weights, prefix if index == 0 else f"layers.{index}") for index in range(count)]
    states, logits = list(features), []
    for place in range(1, len(tokens)):
        state, embedded = states[place - 1], embedding[tokens[place]]
        normed = norm(state, layers[0].at("hidden_norm"))
        inputs = torch.cat((norm(embedded, layers[0].at("input_layernorm")), normed))
        hidden = layers[0](normed if flags.get("norm_before_residual") else state, inputs, place - 1)
        for layer in layers[1:]:
            hidden = layer(hidden, norm(hidden, layer.at("input_layernorm")), place - 1)
        output = norm(hidden, weights["norm.weight"])
        if place >= len(states):
            states.append(output if flags.get("norm_output") else hidden)
        logits.append(weights["lm_head.weight"] @ output)
    return torch.stack(logits)


def eagle1_logits(weights: Weights, shared: Weights, features: Tensor, tokens: list[int]) -> Tensor:
    layer, states, logits = ReferenceLayer(weights, "layers.0"), list(features), []
    for place in range(1, len(tokens)):
        joined = torch.cat((shared["model.embed_tokens.weight"][tokens[place]], states[place - 1]))
        inputs = weights["fc.weight"] @ joined + weights.get("fc.bias", torch.zeros(WIDTH))
        hidden = layer(inputs, inputs, place - 1)
        if place >= len(states):
            states.append(hidden)
        logits.append(shared["lm_head.weight"] @ hidden)
    return torch.stack(logits)


TOKENS = [5, 96, 40, 3, 77, 12, 60, 8, 9, 20]
NUM_TRUE = 6
"""Tokens whose true features are there: the rows from token 7 on, three in all, read the network's own states."""


def chain_logits(model: CachedModel, features: Tensor) -> Tensor:
    """Rows of `TOKENS`: those with true features in one pass, then one by one."""
    network, num_slots = model._network, 16
    memory = KVMemory(num_slots, torch.float32)
    table = memory.features(features.shape[1], torch.device("cpu"))
    parents = [num_slots - 1, *range(num_slots - 1)]  # row t stands in slot t - 1, and feature 0 in the last one
    table[num_slots - 1] = features[0]
    table[: len(features) - 1] = features[1:]
    found = []
    for start, end in [(0, len(features)), *((row, row + 1) for row in range(len(features), len(TOKENS) - 1))]:
        memory.slots_of_pass = range(start, end)
        memory.parents_of_pass = torch.tensor(parents[start:end])
        attention = SplitAttention.of_chain(start, end - start, end, torch.float32)
        tokens = torch.tensor(TOKENS[start + 1 : end + 1])
        with torch.inference_mode():
            logits = network(tokens, torch.arange(start, end), attention, memory, with_logits=True)
        assert logits is not None
        found.append(logits)
    return torch.cat(found)


def check(model: CachedModel, features: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.05, "the weights are too small for this test to see anything"
    torch.testing.assert_close(chain_logits(model, features), expected, atol=1e-4, rtol=1e-4)


def test_eagle3_gives_the_logits_of_the_paper(target: Path, tmp_path: Path) -> None:
    weights = eagle3_weights()
    folder, states = save_eagle3(tmp_path / "draft", weights), random(NUM_TRUE, 3 * WIDTH, seed=99)
    spec = read_feature_spec(folder, target)
    assert (spec.layers, spec.width) == ((2, 3, 3), WIDTH)
    assert spec.reduce is not None
    features = spec.reduce(states)
    torch.testing.assert_close(features, states @ weights["fc.weight"].T)
    model = load_eagle(folder, target, OPTIONS)
    assert model.output_ids is not None
    assert model.output_ids.tolist() == DRAFT_IDS.tolist()
    assert model.max_length == 128, "positions beyond the configuration's are those of the target"
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    check(model, features, eagle3_logits(weights, embedding, features, TOKENS))
