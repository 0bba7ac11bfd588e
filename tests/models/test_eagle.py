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
from models.blocks import check_logits
from safetensors.torch import load_file, save_file
from torch import Tensor

from amusd.checkpoints.draft_layouts import read_published
from amusd.checkpoints.draft_networks import load_published
from amusd.errors import ConfigError
from amusd.models.cpu_attention import Part, cpu_attention, seen_by_chain
from amusd.models.kv_cache import KVMemory, PassMemory
from amusd.models.numerics import Numerics
from amusd.runner.load_options import LoadOptions
from amusd.runner.model_runner import ModelRunner

WIDTH, HEADS, KEY_HEADS, DIM, MLP, LAYERS = 32, 4, 2, 8, 48, 6
EPSILON = 1e-5
DRAFT_IDS = torch.tensor([3, 4, 7, 11, 20, 21, 22, 40, 41, 77, 95, 96])
SIZES = {
    "hidden_size": WIDTH, "intermediate_size": MLP, "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS,
    "vocab_size": tiny.VOCAB, "max_position_embeddings": 64, "rms_norm_eps": EPSILON, "rope_theta": 5e5,
    "hidden_act": "silu",
}  # fmt: skip
OPTIONS = LoadOptions(numerics=Numerics(width=16, fixed=False), max_model_len=128, dtype="float32")
Weights = dict[str, Tensor]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * (1.0 if len(shape) == 1 else 0.2)


def layer_weights(prefix: str, inputs: int, *, head_norms: bool = False) -> Weights:
    shapes = {
        "self_attn.q_proj": (HEADS * DIM, inputs), "self_attn.k_proj": (KEY_HEADS * DIM, inputs),
        "self_attn.v_proj": (KEY_HEADS * DIM, inputs), "self_attn.o_proj": (WIDTH, HEADS * DIM),
        "mlp.gate_proj": (MLP, WIDTH), "mlp.up_proj": (MLP, WIDTH), "mlp.down_proj": (WIDTH, MLP),
        "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,),
    }  # fmt: skip
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
    def __init__(self, weights: Mapping[str, Tensor], prefix: str) -> None:
        self.weights, self.prefix = weights, prefix
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, residual: Tensor, inputs: Tensor, position: int) -> Tensor:
        return self.mixed(residual, self.placed(inputs, position))

    def placed(self, inputs: Tensor, position: int) -> Tensor:
        query, key, value = (self.times(f"self_attn.{name}_proj", inputs).view(-1, DIM) for name in "qkv")
        if f"{self.prefix}.self_attn.q_norm.weight" in self.weights:
            query, key = norm(query, self.at("self_attn.q_norm")), norm(key, self.at("self_attn.k_norm"))
        self.keys.append(rotated(key, position))
        self.values.append(value)
        return rotated(query, position)

    def mixed(self, residual: Tensor, query: Tensor, first: int = 0) -> Tensor:
        seen = self.keys[first:], self.values[first:]
        keys, values = (torch.stack(rows).repeat_interleave(HEADS // KEY_HEADS, 1) for rows in seen)
        scores = torch.einsum("hd,nhd->hn", query, keys) / math.sqrt(DIM)
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
    """Row t reads token t and feature t - 1, which is the output of row t - 1 once `features` ends."""
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
"""Number of tokens with features of the target; the last three rows read the network's own states."""


def chain_logits(model: ModelRunner, features: Tensor) -> Tensor:
    network, num_slots = model.network, 16
    memory = KVMemory(num_slots, torch.float32)
    table = memory.features(features.shape[1], torch.device("cpu"))
    parents = [num_slots - 1, *range(num_slots - 1)]  # row t stands in slot t - 1, and feature 0 in the last one
    table[num_slots - 1] = features[0]
    table[: len(features) - 1] = features[1:]
    found = []
    for start, end in [(0, len(features)), *((row, row + 1) for row in range(len(features), len(TOKENS) - 1))]:
        of_pass = PassMemory(memory, range(start, end), torch.tensor(parents[start:end]))
        attention = cpu_attention([Part(range(end - start), seen_by_chain(start, end - start, end), 0)], end - start)
        tokens = torch.tensor(TOKENS[start + 1 : end + 1])
        with torch.inference_mode():
            logits = network(tokens, torch.arange(start, end), attention, of_pass, with_logits=True)
        found.append(logits)
    return torch.cat(found)


NESTED = {"norm_output": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 5]}


@pytest.mark.parametrize(("nested", "layers"), [({}, (2, 3, 3)), (NESTED, (2, 3, 6))])
def test_eagle3_gives_the_logits_of_the_paper_and_nested_settings_count(
    nested: dict[str, Any], layers: tuple[int, ...], target: Path, tmp_path: Path
) -> None:
    weights, states = eagle3_weights(), random(NUM_TRUE, 3 * WIDTH, seed=99)
    folder = save_eagle3(tmp_path / "draft", weights, eagle_config=nested)
    spec = read_published(folder, target, "eagle").features
    assert (spec.layers, spec.width) == (layers, WIDTH)
    features = spec.reduce(states)
    torch.testing.assert_close(features, states @ weights["fc.weight"].T)
    model = load_published(folder, target, OPTIONS, "eagle")
    assert model.output_ids.tolist() == DRAFT_IDS.tolist()
    assert model.max_length == 128, "positions beyond the configuration's are those of the target"
    embedding = shared_weights(target)["model.embed_tokens.weight"]
    expected = eagle3_logits(weights, embedding, features, TOKENS, norm_output="norm_output" in nested)
    check_logits(chain_logits(model, features), expected)


def shared_weights(target: Path) -> Weights:
    return load_file(target / "model.safetensors")


def save_speculators(folder: Path, weights: Weights, **changes: Any) -> Path:
    settings = {
        "speculators_model_type": "eagle3", "norm_before_residual": False, "draft_vocab_size": 12,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "any"}},
        "transformer_layer_config": {**SIZES, "head_dim": DIM},
    }  # fmt: skip
    return save(folder, weights, **{**settings, **changes})


@pytest.mark.parametrize(("flag", "head_norms"), [("", True), ("norm_before_residual", False), ("norm_output", False)])
def test_eagle3_in_speculators_form(flag: str, head_norms: bool, target: Path, tmp_path: Path) -> None:
    weights = eagle3_weights("layers.0", 2, head_norms=head_norms)
    second = layer_weights("layers.1", WIDTH, head_norms=head_norms)
    weights |= {name: tensor * 0.9 for name, tensor in second.items()}
    stored = {**weights, "verifier_norm.weight": torch.ones(WIDTH)}
    flags = {flag: True} if flag else {}
    folder = save_speculators(tmp_path / "draft", stored, eagle_aux_hidden_state_layer_ids=[1, 6], **flags)
    spec = read_published(folder, target, "eagle").features
    assert spec.layers == (1, 6)
    features = random(NUM_TRUE, WIDTH, seed=98)
    embedding = shared_weights(target)["model.embed_tokens.weight"]
    expected = eagle3_logits(weights, embedding, features, TOKENS, "layers.0", **flags)
    check_logits(chain_logits(load_published(folder, target, OPTIONS, "eagle"), features), expected)


_ONE_NORM = {"input_norm.weight": torch.ones(3 * WIDTH)}
_NORMS = {f"fc_norm.{index}.weight": torch.ones(WIDTH) for index in range(3)}
REFUSED: dict[str, tuple[Mapping[str, Tensor | None], dict[str, Any], str]] = {
    "both norms": (_ONE_NORM | _NORMS, {}, "before_fc': True, 'fc_norm': True.*; allowed: the same, one at most"),
    "a norm that is denied": (_ONE_NORM, {"norm_before_fc": False}, "says .*_fc': False, .*, its file .*_fc': True, "),
    "two of three norms": (dict([*_NORMS.items()][:2]), {}, r"lacks weights, fc_norm\.2\.weight among"),
    "nothing about the residual": ({}, {"norm_before_residual": None}, "lacks norm_before_residual; allowed: true"),
    "a flag as text": ({}, {"norm_output": "false"}, "norm_output='false'; allowed: true, false"),
    "two flags": ({}, {"norm_output": True, "eagle_config": {"norm_output": False}}, "has norm_output=True and, in"),
    "no states": ({}, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False is not"),
    "another width": ({}, {"target_hidden_size": 64}, "target_hidden_size=64 is not supported; allowed: 32"),
    "no weight": ({"layers.0.mlp.up_proj.weight": None}, {}, r"lacks weights, model\.layers\.0\.mlp\.up_proj\.weight "),
    "a weight has no place": ({"another": torch.ones(1)}, {}, "weights without a place, another among them"),
    "no d2t": ({"d2t": None}, {}, r"lm_head.weight has shape \[12, 32\], and config.json asks for \[97, 32\]"),
}


def changed(weights: Weights, changes: Mapping[str, Tensor | None]) -> Weights:
    return {name: tensor for name, tensor in {**weights, **changes}.items() if tensor is not None}


@pytest.mark.parametrize("name", REFUSED)
def test_what_contradicts_itself_or_lacks_something_is_refused(name: str, target: Path, tmp_path: Path) -> None:
    changes, settings, message = REFUSED[name]
    folder = save_speculators(tmp_path / "draft", changed(eagle3_weights("layers.0"), changes), **settings)
    with pytest.raises(ConfigError, match=f"drafter.*{folder}: .*{message}") as caught:
        load_published(folder, target, OPTIONS, "eagle")
    assert "\n" not in f"{caught.value}"


def test_nested_settings_that_are_no_object_are_one_line(target: Path, tmp_path: Path) -> None:
    folder = save_eagle3(tmp_path / "draft", eagle3_weights(), eagle_config="none")
    with pytest.raises(ConfigError, match=rf"^model {folder}: config\.json: .+$"):
        read_published(folder, target, "eagle")


@pytest.mark.parametrize("flag", ["norm_before_fc", "fc_norm"])
def test_states_are_normed_before_fc_where_the_configuration_says_so(flag: str, target: Path, tmp_path: Path) -> None:
    weights = eagle3_weights("layers.0")
    states = random(4, 3 * WIDTH, seed=97)
    if flag == "fc_norm":
        scales = [random(WIDTH, seed=90 + index) for index in range(3)]
        weights |= {f"fc_norm.{index}.weight": scale for index, scale in enumerate(scales)}
        normed = torch.cat([norm(part, scale) for part, scale in zip(states.chunk(3, 1), scales, strict=True)], 1)
    else:
        weights["input_norm.weight"] = random(3 * WIDTH, seed=90)
        normed = norm(states, weights["input_norm.weight"])
    spec = read_published(save_speculators(tmp_path / "draft", weights, **{flag: True}), target, "eagle").features
    torch.testing.assert_close(spec.reduce(states), normed @ weights["fc.weight"].T)


@pytest.mark.parametrize(("bias", "file"), [(False, "pytorch_model.bin"), (True, "model.safetensors")])
def test_eagle1_shares_embedding_and_head_of_the_target(bias: bool, file: str, target: Path, tmp_path: Path) -> None:
    weights = layer_weights("layers.0", WIDTH) | {"fc.weight": random(WIDTH, 2 * WIDTH, seed=60)}
    del weights["layers.0.input_layernorm.weight"]
    if bias:
        weights["fc.bias"] = random(WIDTH, seed=61)
        sizes = {"q": HEADS * DIM, "k": KEY_HEADS * DIM, "v": KEY_HEADS * DIM}
        weights |= {f"layers.0.self_attn.{name}_proj.bias": random(size, seed=62) for name, size in sizes.items()}
    settings = {**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "bias": bias}
    folder = save(tmp_path / "draft", weights, file, **settings)
    spec = read_published(folder, target, "eagle").features
    assert (spec.layers, spec.width, spec.weights) == ((LAYERS,), WIDTH, {})
    model, features = load_published(folder, target, OPTIONS, "eagle"), random(NUM_TRUE, WIDTH, seed=98)
    assert model.output_ids is None
    check_logits(chain_logits(model, features), eagle1_logits(weights, shared_weights(target), features, TOKENS))


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny.byte_tokenizer()
    sizes = {"num_hidden_layers": LAYERS, "vocab_size": len(tokenizer)}
    tiny.save_checkpoint(tmp_path / "target", tiny.tiny_config(**sizes), tokenizer)
    weights = changed(eagle3_weights(), {"t2d": None})
    same = save_eagle3(tmp_path / "same", weights, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(same)
    load_published(same, tmp_path / "target", OPTIONS, "eagle")
    other = save_eagle3(tmp_path / "other", weights, vocab_size=len(tokenizer))
    tiny.byte_tokenizer(("<end>",)).save_pretrained(other)
    with pytest.raises(ConfigError, match="its tokenizer differs from the target's"):
        load_published(other, tmp_path / "target", OPTIONS, "eagle")


def test_a_pickle_that_holds_more_than_tensors_is_never_run(target: Path, tmp_path: Path) -> None:
    folder = save(tmp_path / "draft", {"fc.weight": Path("/")}, "pytorch_model.bin", **SIZES)  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="damaged or holds more than tensors"):
        load_published(folder, target, OPTIONS, "eagle")
