"""Reads published drafters that work on their target's hidden states, and checks that they fit the target.

The weights of each layout:

    EAGLE-1, -2 `fc` reduces embedding and state to one width. `layers.0.*` has no first norm. Embedding and head are
                the target's.
    EAGLE-3     `fc` reduces three states to a feature. The attention of `midlayer.*` (`layers.0.*` in `speculators`
                files) reads embedding and feature side by side. `norm` is last. Column j of `lm_head` scores
                token j + `d2t[j]`; `t2d`, a mask of the same tokens, is unused.
    Medusa      Each head has residual blocks `{head}.{block}.linear.*`, then `{head}.{number of blocks}.weight`.
    DFlash      `fc` and `hidden_norm` reduce several states to a feature. `layers.*` and `norm` follow. Embedding and
                head are the target's.

Layouts number the target's layers differently: `_feature_layers` gives the numbers of `features.py`. The papers are
named in `draft_networks.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amusd.checkpoints.checkpoint import DRAFTER_FILES, find_checkpoint, one_line_errors, open_checkpoint, read_json
from amusd.checkpoints.configuration import ModelConfig, as_own, load_config
from amusd.checkpoints.decoder_weights import fit_weights, weight_shapes
from amusd.checkpoints.settled import MODEL_TYPES
from amusd.checkpoints.tokenizer import load_tokenizer, read_fingerprint
from amusd.checkpoints.vocabulary import EMBEDDING, HEAD
from amusd.errors import ConfigError
from amusd.files import CONFIG_JSON
from amusd.models.features import INPUT_NORMS, FeatureSpec

EAGLE, EAGLE3, MEDUSA, DFLASH = "eagle", "eagle3", "medusa", "dflash"

_COPIES_OF_TARGET = ("verifier_norm.", "verifier_lm_head.", "rotary_emb.")
_REDUCTION = {EAGLE: (), EAGLE3: ("fc.", *INPUT_NORMS), DFLASH: ("fc.", *INPUT_NORMS, "hidden_norm.")}
"""Prefixes of the weights with which the target reduces its states (`FeatureSpec`)."""

_NESTED = ("transformer_layer_config", "eagle_config", "dflash_config")
_INPUT_NORM_OF_KEY = dict(zip(("norm_before_fc", "fc_norm"), INPUT_NORMS, strict=True))
_FLAGS = ("norm_before_residual", "norm_output", "sample_from_anchor", *_INPUT_NORM_OF_KEY)
_ONLY = {"parallel_drafting": False, "input_embedding_scale": 1, "output_multiplier": 1, "final_logit_softcapping": 0}
"""Settings with one supported value."""
_ONLY_OF = {EAGLE: {}, EAGLE3: {"use_aux_hidden_state": True}, DFLASH: {"is_causal": False}}
_SIZES = ("block_size", "mask_token_id", "layer_types", "sliding_window", "swa_window_size")
_OF_TARGET = {"target_hidden_size": "hidden_size", "num_target_layers": "num_hidden_layers"}
_READ = {*_FLAGS, *_ONLY, *_ONLY_OF[EAGLE3], *_ONLY_OF[DFLASH], *_SIZES, *_OF_TARGET}
"""Settings that may stand at the top level or in a nested object."""


@dataclass(frozen=True, slots=True)
class PublishedDraft:
    """A drafter's files, checked against its target; made by `read_published`."""

    path: str | Path
    settings: Mapping[str, Any]
    target: Any
    """The target's configuration."""
    weights: dict[str, Tensor]
    """Weights as stored, on the CPU, by transformers' names; missing ends (embedding, head) are the target's."""
    features: FeatureSpec
    config: Any = None
    """Configuration of the drafter's layers; None for Medusa."""
    output_ids: Tensor | None = None
    """[columns] int64, ascending: the token of each column of the head; None: column `j` scores `j`."""


def read_published(path: str | Path, target_path: str | Path, kind: str) -> PublishedDraft:
    """Read a drafter (`eagle`, `medusa`, `dflash`) from a folder or hub name; weights stay mapped.

    Raises `ConfigError` for missing or damaged files, wrong shapes or kinds, or another target.
    """
    folder = find_checkpoint(path)
    with one_line_errors(path, CONFIG_JSON):
        settings = _read_settings(path, read_json(path, folder, CONFIG_JSON))
    target = load_config(target_path).get_text_config(decoder=True)
    with one_line_errors(path):
        stored = open_checkpoint(path, DRAFTER_FILES).items()
        own = {name: tensor for name, tensor in stored if not any(part in name for part in _COPIES_OF_TARGET)}
        weights = {_canonical(name): tensor for name, tensor in own.items()}
        last = FeatureSpec((target.num_hidden_layers,), target.hidden_size)
        draft = PublishedDraft(path, settings, target, weights, last)
        if kind == MEDUSA:
            fit_weights(f"drafter=medusa {path}", weights, _medusa_shapes(weights, target), all_given=True)
        else:
            draft = _read_layers(f"drafter={kind} {path}", kind, draft, target_path)
        if difference := _difference(draft, target_path, folder / "tokenizer.json"):
            raise ConfigError(f"drafter {path}: made for another target: {difference}")
    return draft


def _read_layers(owner: str, kind: str, draft: PublishedDraft, target_path: str | Path) -> PublishedDraft:
    """`draft` with the configuration and features of its layers; its `weights` become those of `Decoder`."""
    weights, target = draft.weights, draft.target
    family = EAGLE3 if kind == EAGLE and "hidden_norm.weight" in weights else kind
    _check_settings(f"{owner}: config.json", family, draft)
    config, layers = _layer_config(draft), _feature_layers(f"{owner}: config.json", family, draft)
    blocks = {"block_size": range(2, 1 << 16), "mask_token_id": range(target.vocab_size)} if family == DFLASH else {}
    for name, numbers in blocks.items():
        if (value := draft.settings.get(name)) not in numbers:
            raise ConfigError(f"{owner}: config.json: {name}={value}; allowed: {numbers[0]} to {numbers[-1]}")
    output_ids = None
    if "d2t" in weights:
        ids = torch.arange(len(weights["d2t"])) + weights["d2t"].long()
        output_ids = None if torch.equal(ids, torch.arange(target.vocab_size)) else ids
    if EMBEDDING not in weights:
        weights[EMBEDDING] = target_weight(target_path, EMBEDDING)
    if HEAD not in weights:
        whole = target_weight(target_path, HEAD)
        weights[HEAD] = whole if output_ids is None else whole[output_ids]
    fit_weights(owner, weights, _shapes(family, config, draft, len(layers)), all_given=True)
    reduction = {name: weights.pop(name) for name in [*weights] if name.startswith(_REDUCTION[family])}
    width = len(reduction["fc.weight"]) if reduction else target.hidden_size
    features = FeatureSpec(layers, width, reduction, config.rms_norm_eps)
    return replace(draft, features=features, config=config, output_ids=output_ids)


def _read_settings(path: str | Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` without nulls, plus nested settings in `_READ`. Raises `ConfigError` for two different values."""
    found = {name: value for name, value in settings.items() if value is not None}
    for nested in _NESTED:
        for name, value in dict(found.get(nested, {})).items():
            if name in _READ and value is not None and found.setdefault(name, value) != value:
                said = f"{name}={found[name]} and, in {nested}, {value}"
                raise ConfigError(f"drafter {path}: config.json has {said}; allowed: one value")
    return found


def _check_settings(owner: str, family: str, draft: PublishedDraft) -> None:
    settings, expected = draft.settings, {"speculators_model_type": family}
    expected |= {name: getattr(draft.target, own) for name, own in _OF_TARGET.items()}
    for name, value in {**_ONLY, **_ONLY_OF[family], **expected}.items():
        if settings.get(name, value) != value:
            raise ConfigError(f"{owner}: {name}={settings[name]} is not supported; allowed: {value}")
    for name in _FLAGS:
        if not isinstance(settings.get(name, False), bool):
            raise ConfigError(f"{owner}: {name}={settings[name]!r}; allowed: true, false")
    if family == EAGLE3 and "speculators_model_type" in settings and "norm_before_residual" not in settings:
        raise ConfigError(f"{owner}: lacks norm_before_residual; allowed: true, false")
    has = {key: any(name.startswith(prefix) for name in draft.weights) for key, prefix in _INPUT_NORM_OF_KEY.items()}
    said = {key: settings.get(key, has[key]) for key in has}
    if said != has or all(has.values()):
        raise ConfigError(f"{owner}: says {said} of norms before fc, its file {has}; allowed: the same, one at most")


def target_weight(path: str | Path, name: str) -> Tensor:
    """The target's embedding or head, without reading other weights."""
    stored = open_checkpoint(path)
    found = [tensor for each, tensor in stored.items() if each.endswith(name.removeprefix("model."))]
    if not found and name == HEAD:  # tied
        return target_weight(path, EMBEDDING)
    if len(found) != 1:
        raise ConfigError(f"model {path}: no {name} in its *.safetensors files")
    return found[0]


def _canonical(name: str) -> str:
    name = re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model.").removeprefix("medusa_head."))
    name = re.sub(r"^layers\.0\.hidden_norm\.", "hidden_norm.", name)
    return f"model.{name}" if name.startswith(("layers.", "embed_tokens.", "norm.")) else name


def _layer_config(draft: PublishedDraft) -> ModelConfig:
    from amusd.checkpoints.transformers_models import make_stock_config

    path, settings, weights, target = draft.path, draft.settings, draft.weights, draft.target
    sizes = dict(settings.get("transformer_layer_config", settings))
    sizes["num_hidden_layers"] = max(1, sum(name.endswith(".post_attention_layernorm.weight") for name in weights))
    if sizes.get("model_type") not in MODEL_TYPES:
        sizes["model_type"] = "qwen3" if "model.layers.0.self_attn.q_norm.weight" in weights else "llama"
    layer_types = settings.get("layer_types", ())[: sizes["num_hidden_layers"]]
    sizes["layer_types"] = list(layer_types) or None
    config = as_own(make_stock_config({**sizes, "vocab_size": target.vocab_size, "tie_word_embeddings": False}))
    if config is None:
        raise ConfigError(f"drafter {path}: amusd's decoder does not compute its layers; allowed: hidden_act=silu")
    if "sliding_attention" in layer_types:  # which transformers drops for some model types
        window = settings.get("swa_window_size", settings.get("sliding_window"))
        if not isinstance(window, int) or window < 1:
            raise ConfigError(f"drafter {path}: sliding_window={window}; its layer_types need a number of tokens")
        config.layer_types, config.sliding_window = layer_types, window
    config.owner = f"drafter {path}"
    if config.rope_parameters["rope_type"] in ("default", "llama3"):  # their angles do not depend on the length
        longest = getattr(target, "max_position_embeddings", None) or 0
        config.max_position_embeddings = max(config.max_position_embeddings, longest)
    return config


def _feature_layers(owner: str, family: str, draft: PublishedDraft) -> tuple[int, ...]:
    settings, num_layers = draft.settings, draft.target.num_hidden_layers
    if family == EAGLE:
        return draft.features.layers
    stated = [
        # Most lists number outputs: the output of layer i is state i + 1.
        (place[name], 0 if place is settings and name != "target_layer_ids" else 1)
        for place in (settings, settings.get("eagle_config", {}), settings.get("dflash_config", {}))
        for name in ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids")
        if place.get(name)
    ]
    if not stated and family == DFLASH:
        raise ConfigError(f"{owner}: lacks dflash_config.target_layer_ids, the target's layers that it reads")
    lists = [ids for ids, _ in stated]
    if any(not isinstance(ids, list) or {*map(type, ids)} != {int} for ids in lists):
        raise ConfigError(f"{owner}: {lists[0]} for the target's layers that it reads; allowed: a list of numbers")
    meant = [tuple(index + offset for index in ids) for ids, offset in stated]
    if any(meant[0] != other for other in meant) and any(lists[0] != other for other in lists):
        raise ConfigError(f"{owner}: names the target's layers that it reads more than once: {meant}")
    return meant[0] if meant else (2, num_layers // 2, num_layers - 3)


def _shapes(family: str, config: ModelConfig, draft: PublishedDraft, num_states: int) -> dict[str, tuple[int, ...]]:
    weights, target = draft.weights, draft.target
    width, hidden, first = config.hidden_size, target.hidden_size, "model.layers.0"
    shapes = weight_shapes(config)
    if family == EAGLE:
        del shapes[f"{first}.input_layernorm.weight"], shapes["model.norm.weight"]
        shapes["fc.weight"] = (width, 2 * hidden)
    else:
        shapes |= {"fc.weight": (width, num_states * hidden), "hidden_norm.weight": (width,)}
    if family == EAGLE3:
        for name in (f"{first}.self_attn.{name}_proj.weight" for name in "qkv"):
            shapes[name] = (shapes[name][0], 2 * width)
    columns = len(weights["d2t"]) if "d2t" in weights else config.vocab_size
    optional = {"d2t": (columns,), "t2d": (config.vocab_size,), "input_norm.weight": (num_states * hidden,)}
    if any(name.startswith("fc_norm.") for name in weights):  # all of them
        shapes |= {f"fc_norm.{index}.weight": (hidden,) for index in range(num_states)}
    return shapes | {HEAD: (columns, width)} | {name: optional[name] for name in optional if name in weights}


def medusa_heads(weights: Mapping[str, Tensor]) -> list[list[str]]:
    """Layer names of each Medusa head: residual blocks, then the output layer."""
    heads = []
    for head in range(1 + max((int(name.split(".")[0]) for name in weights if name[0].isdigit()), default=-1)):
        number = sum(name.startswith(f"{head}.") and name.endswith(".linear.weight") for name in weights)
        heads.append([*(f"{head}.{block}.linear" for block in range(number)), f"{head}.{number}"])
    return heads


def _medusa_shapes(weights: Mapping[str, Tensor], target: Any) -> dict[str, tuple[int, ...]]:
    width, shapes = int(target.hidden_size), dict[str, tuple[int, ...]]()
    for *blocks, output in medusa_heads(weights):
        shapes |= {f"{block}.weight": (width, width) for block in blocks}
        shapes[f"{output}.weight"] = (int(target.vocab_size), width)
    return shapes


def _difference(draft: PublishedDraft, target_path: str | Path, tokenizer: Path) -> str | None:
    num_layers, vocab_size, ids = draft.target.num_hidden_layers, draft.target.vocab_size, draft.output_ids
    layers = draft.features.layers
    if min(layers) < 0 or max(layers) > num_layers:
        return f"it reads states {list(layers)}, and this one has {num_layers} layers"
    if ids is not None and not (ids[0] >= 0 and ids[-1] < vocab_size and bool((ids.diff() > 0).all())):
        return f"its d2t does not name ascending tokens of {vocab_size}"
    columns = vocab_size if ids is None else len(ids)  # some files state the number of columns as vocab_size
    sizes = draft.settings.get("transformer_layer_config", draft.settings)
    if (stated := sizes.get("vocab_size", vocab_size)) not in (vocab_size, columns):
        return f"that had {stated} token ids, and this one has {vocab_size}"
    if tokenizer.is_file() and read_fingerprint(tokenizer) != load_tokenizer(target_path).fingerprint:
        return "its tokenizer differs from the target's"
    return None
