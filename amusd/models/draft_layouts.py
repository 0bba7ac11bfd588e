"""Reads published drafters that work on their target's hidden states.

    EAGLE-3     `fc` over three states, `midlayer.*` (or `layers.0.*`, in `speculators` form) whose attention takes in
                embedding and feature side by side, `norm`, `lm_head` over a part of the vocabulary, `d2t`, `t2d`
    EAGLE-1, -2 `fc` over embedding and feature, `layers.0.*` without a first norm; embedding and head are the target's
    Medusa      `{head}.{layer}.linear.*` residual blocks and `{head}.{number of them}.weight`, for each head
    DFlash      `fc` and `hidden_norm` over several states, `layers.*`, `norm`; embedding and head are the target's

Layers are counted as in `features.py`; layouts count otherwise (`_feature_layers`).

References:
    Li et al., EAGLE, arXiv:2401.15077, and EAGLE-3, arXiv:2503.01840. Cai et al., Medusa, arXiv:2401.10774. Chen et
    al., DFlash, arXiv:2602.06036.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amusd.errors import ConfigError
from amusd.models.checkpoint import CONFIG, OF_DRAFTERS, find_checkpoint, one_line_errors, open_checkpoint, read_json
from amusd.models.configuration import MODEL_TYPES, ModelConfig, as_own, load_config
from amusd.models.decoder import fit_weights, weight_shapes
from amusd.models.features import FeatureSpec
from amusd.models.tokenizer import load_tokenizer, read_fingerprint
from amusd.models.vocabulary import EMBEDDING, HEAD

EAGLE, EAGLE3, MEDUSA, DFLASH = "eagle", "eagle3", "medusa", "dflash"
KINDS = {EAGLE: "eagle", EAGLE3: "eagle", MEDUSA: "medusa", DFLASH: "dflash"}

_SPECULATORS_TYPE = "speculators_model_type"
_COPIES_OF_TARGET = ("verifier_norm.", "verifier_lm_head.", "rotary_emb.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_INPUT_NORMS = ("input_norm.", "fc_norm.")
_BESIDE_LAYERS = {
    EAGLE: (),
    EAGLE3: ("d2t", "t2d", "fc.", *_INPUT_NORMS),
    DFLASH: ("d2t", "t2d", "fc.", *_INPUT_NORMS, "hidden_norm."),
}


@dataclass(frozen=True, slots=True)
class PublishedDraft:
    """A drafter's files, checked against its target; made by `read_published`."""

    path: str | Path
    family: str
    settings: Mapping[str, Any]
    config: Any
    """Configuration of its layers; None for Medusa."""
    weights: Mapping[str, Tensor]
    """As stored, on the CPU, by transformers' names; other parts by their own (`fc.weight`, `d2t`)."""
    target_path: str | Path
    target: Any
    feature_layers: tuple[int, ...]

    @property
    def output_ids(self) -> Tensor | None:
        """[columns] int64, ascending: the token of each column of the head; None: column `j` scores `j`."""
        offsets = self.weights.get("d2t")
        if offsets is None or (len(offsets) == self.target.vocab_size and not bool(offsets.any())):
            return None
        return offsets.long() + torch.arange(len(offsets))

    def feature_spec(self) -> FeatureSpec:
        """The target's features that it reads."""
        if self.family in (EAGLE, MEDUSA):
            return FeatureSpec(self.feature_layers, int(self.target.hidden_size))
        return FeatureSpec(self.feature_layers, len(self.weights["fc.weight"]), _Reduction(self))

    def network_weights(self) -> dict[str, Tensor]:
        """Weights of its network, with the target's embedding and head where it lacks them."""
        beside = _BESIDE_LAYERS[self.family]
        weights = {name: tensor for name, tensor in self.weights.items() if not name.startswith(beside)}
        if EMBEDDING not in weights:
            weights[EMBEDDING] = target_weight(self.target_path, EMBEDDING)
        if HEAD not in weights:
            whole, ids = target_weight(self.target_path, HEAD), self.output_ids
            weights[HEAD] = whole if ids is None else whole[ids]
        return weights


class _Reduction(torch.nn.Module):
    """Reduces states to features: optional norms and `fc`, in their stored dtype."""

    def __init__(self, draft: PublishedDraft) -> None:
        super().__init__()
        weights = draft.weights

        def module(name: str) -> torch.nn.Module:
            weight = weights[f"{name}.weight"]
            if weight.ndim == 1:
                return torch.nn.RMSNorm(len(weight), eps=draft.config.rms_norm_eps, device="meta")
            outputs, inputs = weight.shape
            return torch.nn.Linear(inputs, outputs, bias=f"{name}.bias" in weights, device="meta")

        norms = [name.removesuffix(".weight") for name in sorted(weights) if name.startswith(_INPUT_NORMS)]
        outputs = ["fc", "hidden_norm"] if draft.family == DFLASH else ["fc"]
        self.norms = torch.nn.ModuleList(module(name) for name in norms)
        self.outputs = torch.nn.Sequential(*(module(name) for name in outputs))
        for name, part in zip([*norms, *outputs], [*self.norms, *self.outputs], strict=True):
            own = {key: weights[f"{name}.{key}"] for key, _ in part.named_parameters()}
            part.load_state_dict(own, assign=True)

    def forward(self, states: Tensor) -> Tensor:
        """[rows, layers * hidden size] -> [rows, width]."""
        if self.norms:
            parts = states.chunk(len(self.norms), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.norms, parts, strict=True)], dim=-1)
        features: Tensor = self.outputs(states)
        return features


def read_feature_spec(path: str | Path, target_path: str | Path, kind: str) -> FeatureSpec:
    """Read which features the drafter in `path` needs. Raises as `read_published`."""
    return read_published(path, target_path, kind).feature_spec()


def read_published(path: str | Path, target_path: str | Path, kind: str) -> PublishedDraft:
    """Read a drafter of this kind (one of `KINDS`) from a folder or hub name; weights stay mapped.

    Raises `ConfigError` for missing or damaged files, other shapes or kinds, or another target.
    """
    folder = find_checkpoint(path)
    settings = read_json(path, folder, CONFIG)
    target = load_config(target_path).get_text_config(decoder=True)
    with one_line_errors(path):
        stored = open_checkpoint(path, OF_DRAFTERS)
        family = _family(path, settings, stored)
        if (found := KINDS[family]) != kind:
            raise ConfigError(f"drafter={kind}: {path} holds one for drafter={found}")
        weights = {
            _canonical(name, family): tensor
            for name, tensor in stored.items()
            if not any(part in name for part in _COPIES_OF_TARGET)
        }
        config = None if family == MEDUSA else _layer_config(settings, weights, target)
        layers = _feature_layers(family, settings, int(target.num_hidden_layers))
        shapes = _medusa_shapes(weights, target) if config is None else _shapes(family, config, weights, target, layers)
        weights = fit_weights(f"drafter {path}", weights, shapes, all_given=True)
        draft = PublishedDraft(path, family, settings, config, weights, target_path, target, layers)
        if difference := _difference(draft, folder):
            raise ConfigError(f"drafter {path}: made for another target: {difference}")
    return draft


def target_weight(path: str | Path, name: str) -> Tensor:
    """The target's embedding or head, without reading other weights."""
    stored = open_checkpoint(path)
    found = [tensor for each, tensor in stored.items() if each.endswith(name.removeprefix("model."))]
    if not found and name == HEAD:  # tied
        return target_weight(path, EMBEDDING)
    if len(found) != 1:
        raise ConfigError(f"model {path}: no {name} in its *.safetensors files")
    return found[0]


def _family(path: str | Path, settings: Mapping[str, Any], stored: Mapping[str, Tensor]) -> str:
    if (kind := settings.get(_SPECULATORS_TYPE)) is not None:
        if kind in (EAGLE3, DFLASH):
            return str(kind)
        raise ConfigError(f"drafter {path}: {_SPECULATORS_TYPE}={kind}; allowed: {EAGLE3} or {DFLASH}")
    bare = {name.removeprefix("model.").removeprefix("medusa_head.") for name in stored}
    if any(re.fullmatch(r"\d+\.\d+\.(linear\.)?weight", name) for name in bare):
        return MEDUSA
    if "fc.weight" in bare and any(name.startswith(("midlayer.", "layers.0.")) for name in bare):
        if "dflash_config" in settings or "target_layer_ids" in settings:
            return DFLASH
        is_eagle3 = any(name.startswith("midlayer.") or name.endswith("hidden_norm.weight") for name in bare)
        return EAGLE3 if is_eagle3 else EAGLE
    raise ConfigError(f"drafter {path}: its weights are in no layout of EAGLE, Medusa or DFlash")


def _canonical(name: str, family: str) -> str:
    name = name.removeprefix("model.")
    if family == MEDUSA:
        return name.removeprefix("medusa_head.")
    if family == EAGLE3:
        name = re.sub(r"^midlayer\.", "layers.0.", name)
        name = re.sub(r"^layers\.0\.hidden_norm\.", "hidden_norm.", name)
    return f"model.{name}" if name.startswith(("layers.", "embed_tokens.", "norm.")) else name


def _sizes(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    sizes: Mapping[str, Any] = settings.get("transformer_layer_config", settings)
    return sizes


def _layer_config(settings: Mapping[str, Any], weights: Mapping[str, Tensor], target: Any) -> ModelConfig:
    sizes = dict(_sizes(settings))
    sizes["num_hidden_layers"] = 1 + max(int(found[1]) for found in map(_LAYER.match, weights) if found)
    if sizes.get("model_type") not in MODEL_TYPES:
        sizes["model_type"] = "qwen3" if "model.layers.0.self_attn.q_norm.weight" in weights else "llama"
    if sizes.get("layer_types"):
        sizes["layer_types"] = sizes["layer_types"][: sizes["num_hidden_layers"]]
    from amusd.models.adapter import make_stock_config

    config = as_own(make_stock_config({**sizes, "vocab_size": target.vocab_size, "tie_word_embeddings": False}))
    if config is None:
        raise ConfigError("amusd's decoder does not compute its layers")
    if config.rope_parameters["rope_type"] in ("default", "llama3"):  # whose angles do not depend on it
        longest = getattr(target, "max_position_embeddings", None) or 0
        config.max_position_embeddings = max(config.max_position_embeddings, longest)
    return config


def _feature_layers(family: str, settings: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    if family in (EAGLE, MEDUSA):
        return (num_layers,)
    nested = settings.get("eagle_config") or settings.get("dflash_config") or {}
    eagle, other, outputs = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids"
    counts_states = (settings.get(eagle), settings.get(other))
    counts_outputs = (nested.get(eagle), nested.get(outputs), settings.get(outputs))
    stated = [(ids, 0) for ids in counts_states if ids] + [(ids, 1) for ids in counts_outputs if ids]
    ids, offset = stated[0] if stated else ((2, num_layers // 2, num_layers - 3), 0)
    return tuple(index + offset for index in ids)


def _shapes(
    family: str, config: ModelConfig, weights: Mapping[str, Tensor], target: Any, feature_layers: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    width, hidden, first = int(config.hidden_size), int(target.hidden_size), "model.layers.0"
    num_states = len(feature_layers)
    shapes = weight_shapes(config)
    if family == EAGLE:
        del shapes[f"{first}.input_layernorm.weight"], shapes["model.norm.weight"]
        shapes["fc.weight"] = (width, 2 * width)
    else:
        shapes |= {"fc.weight": (width, num_states * hidden), "hidden_norm.weight": (width,)}
    if family == EAGLE3:
        for name in (f"{first}.self_attn.{name}_proj.weight" for name in "qkv"):
            shapes[name] = (shapes[name][0], 2 * width)
    columns = len(weights["d2t"]) if "d2t" in weights else config.vocab_size
    optional: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, width),
        HEAD: (columns, width),
        "d2t": (columns,),
        "t2d": (config.vocab_size,),
        "input_norm.weight": (num_states * hidden,),
        **{f"fc_norm.{index}.weight": (hidden,) for index in range(num_states)},
    }
    needed = {name: shape for name, shape in shapes.items() if name not in optional}
    return needed | {name: shape for name, shape in optional.items() if name in weights}


def medusa_heads(weights: Mapping[str, Tensor]) -> list[list[str]]:
    """Layer names of each Medusa head: residual blocks, then the output layer."""
    heads = []
    for head in range(1 + max(int(name.split(".")[0]) for name in weights if name[0].isdigit())):
        number = sum(name.startswith(f"{head}.") and name.endswith(".linear.weight") for name in weights)
        heads.append([*(f"{head}.{block}.linear" for block in range(number)), f"{head}.{number}"])
    return heads


def _medusa_shapes(weights: Mapping[str, Tensor], target: Any) -> dict[str, tuple[int, ...]]:
    width, shapes = int(target.hidden_size), dict[str, tuple[int, ...]]()
    for *blocks, output in medusa_heads(weights):
        shapes |= {f"{block}.weight": (width, width) for block in blocks}
        shapes[f"{output}.weight"] = (int(target.vocab_size), width)
    return shapes


def _difference(draft: PublishedDraft, folder: Path) -> str | None:
    num_layers, vocab_size, ids = draft.target.num_hidden_layers, int(draft.target.vocab_size), draft.output_ids
    if min(draft.feature_layers) < 0 or max(draft.feature_layers) > num_layers:
        return f"it reads states {list(draft.feature_layers)}, and this one has {num_layers} layers"
    is_whole = draft.config is None or {EMBEDDING, HEAD} <= draft.weights.keys()
    if not is_whole and draft.config.hidden_size != draft.target.hidden_size:
        return f"its width is {draft.config.hidden_size}, and that of this one {draft.target.hidden_size}"
    if ids is not None and not (ids[0] >= 0 and ids[-1] < vocab_size and bool((ids.diff() > 0).all())):
        return f"its d2t does not name ascending tokens of {vocab_size}"
    columns = vocab_size if ids is None else len(ids)  # which some files give as vocab_size
    if (stated := _sizes(draft.settings).get("vocab_size", vocab_size)) not in (vocab_size, columns):
        return f"that had {stated} token ids, and this one has {vocab_size}"
    file = folder / "tokenizer.json"
    if file.is_file() and read_fingerprint(file) != load_tokenizer(draft.target_path).fingerprint:
        return "its tokenizer differs from the target's"
    return None
