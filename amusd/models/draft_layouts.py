"""Reads published drafters that work on their target's hidden states. Every layout becomes a `PublishedDraft`.

    EAGLE-3     `fc` over three states, `midlayer.*` (or `layers.0.*`, in `speculators` form) whose attention takes in
                embedding and feature side by side, `norm`, `lm_head` over a part of the vocabulary, `d2t`, `t2d`
    EAGLE-1, -2 `fc` over embedding and feature, `layers.0.*` without a first norm; embedding and head are the target's
    Medusa      `{head}.{layer}.linear.*` residual blocks and `{head}.{number of them}.weight`, for each head
    DFlash      `fc` and `hidden_norm` over several states, `layers.*`, `norm`; embedding and head are the target's

Indices of layers are those of transformers' `hidden_states`: 0 the embedding, j the output of layer j - 1, and the
number of layers the state after the final norm. Layouts count otherwise (`_feature_layers`).

References:
    Li et al., EAGLE, arXiv:2401.15077, and EAGLE-3, arXiv:2503.01840. Cai et al., Medusa, arXiv:2401.10774. Chen et
    al., DFlash, arXiv:2602.06036.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amusd.errors import ConfigError, UnsupportedModelError
from amusd.models.checkpoint import CONFIG, find_checkpoint, one_line_errors, open_checkpoint, read_head
from amusd.models.configuration import MODEL_TYPES, ModelConfig, load_config
from amusd.models.decoder import fit_weights, weight_shapes
from amusd.models.features import FeatureSpec
from amusd.models.huggingface import prepare, prepare_device
from amusd.models.linear import INT8, why_not_int8
from amusd.models.load_options import LoadOptions
from amusd.models.tokenizer import load_tokenizer, read_fingerprint
from amusd.models.vocabulary import EMBEDDING, HEAD

EAGLE, EAGLE3, MEDUSA, DFLASH = "eagle", "eagle3", "medusa", "dflash"
KINDS = {EAGLE: "eagle", EAGLE3: "eagle", MEDUSA: "medusa", DFLASH: "dflash"}
"""Which `drafter=` each is."""

_SPECULATORS_TYPE = "speculators_model_type"
_COPIES_OF_TARGET = ("verifier_norm.", "verifier_lm_head.", "rotary_emb.")
"""Weights of the target, or made from the configuration, that some files hold too."""
_NOT_OF_LAYERS = frozenset({
    "model_type", "architectures", "auto_map", "dtype", "torch_dtype", "num_hidden_layers", "vocab_size",
    "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings",
})  # fmt: skip
"""Keys of a configuration that say nothing of the layers, or are taken from the weights and the target."""


@dataclass(frozen=True, slots=True)
class PublishedDraft:
    """A drafter as its files have it, checked against its target. `read_published` makes one."""

    path: str | Path
    family: str
    settings: Mapping[str, Any]
    """Its `config.json`."""
    config: Any
    """The configuration of its layers; None for Medusa, which has none."""
    weights: Mapping[str, Tensor]
    """As stored, on the CPU, by the names of transformers' model; other parts by their own (`fc.weight`, `d2t`)."""
    target_path: str | Path
    target: Any
    """The configuration of the target's text model."""
    feature_layers: tuple[int, ...]
    """See `FeatureSpec.layers`."""

    @property
    def output_ids(self) -> Tensor | None:
        """[columns] int64, ascending: the token that each column of the head scores; None: column `j` scores `j`.

        `d2t` holds the distance of each token from its column.
        """
        offsets = self.weights.get("d2t")
        if offsets is None or (len(offsets) == self.target.vocab_size and not bool(offsets.any())):
            return None
        return offsets.long() + torch.arange(len(offsets))

    def head(self) -> Tensor:
        """[columns, width]: the drafter's own head, or the rows of the target's that `output_ids` name."""
        own, ids = self.weights.get(HEAD), self.output_ids
        if own is not None:
            return own
        whole = target_weight(self.target_path, HEAD)
        return whole if ids is None else whole[ids]

    def embedding(self) -> Tensor:
        """[ids, width]: the drafter's own embedding, or the target's."""
        own = self.weights.get(EMBEDDING)
        return target_weight(self.target_path, EMBEDDING) if own is None else own

    def feature_spec(self) -> FeatureSpec:
        """The features that it reads of the target."""
        width = int(self.target.hidden_size)
        if self.family in (EAGLE, MEDUSA):
            return FeatureSpec(self.feature_layers, width)
        reduce = _Reduction(self, int(self.weights["fc.weight"].shape[1]))
        return FeatureSpec(self.feature_layers, int(self.weights["fc.weight"].shape[0]), reduce)

    def fill(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """The weights of these names and shapes, those that the target shares among them, and the biases there are.

        Raises `ConfigError` if weights are missing, too many or of other shapes.
        """
        elsewhere = ("d2t", "t2d", *_BESIDE_TARGET[self.family])
        given = {name: tensor for name, tensor in self.weights.items() if not name.startswith(elsewhere)}
        given |= {EMBEDDING: self.embedding(), HEAD: self.head()}
        return fit_weights(f"drafter {self.path}", given, shapes, all_given=True)


_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_NEEDED = {
    EAGLE: ("fc.weight", "model.layers.0.self_attn.q_proj.weight"),
    EAGLE3: ("fc.weight", "model.layers.0.self_attn.q_proj.weight"),
    DFLASH: ("fc.weight", "hidden_norm.weight", "model.layers.0.self_attn.q_proj.weight"),
    MEDUSA: (),
}
"""Weights that are looked at before all of them are checked."""
_BESIDE_TARGET: Mapping[str, tuple[str, ...]] = {
    EAGLE: (),
    EAGLE3: ("fc.", "input_norm.", "fc_norm."),
    DFLASH: ("fc.", "hidden_norm."),
    MEDUSA: (),
}
"""Starts of the names of the weights that `FeatureSpec.reduce` holds."""


class _Reduction(torch.nn.Module):
    """The features of states: norms where the layout has them, and `fc`. Weights keep their stored dtype."""

    def __init__(self, draft: PublishedDraft, width: int) -> None:
        super().__init__()
        weights, epsilon = draft.weights, draft.config.rms_norm_eps

        def norm(name: str) -> torch.nn.Module:
            weight = weights[name]
            made = torch.nn.RMSNorm(len(weight), eps=epsilon, device="meta")
            made.weight = torch.nn.Parameter(weight, requires_grad=False)
            return made

        names = sorted(name for name in weights if name.startswith(("input_norm.", "fc_norm.")))
        self.input_norms = torch.nn.ModuleList([norm(name) for name in names])
        """One for all states together, or one for each."""
        self.fc = torch.nn.Linear(width, len(weights["fc.weight"]), bias="fc.bias" in weights, device="meta")
        for name, _ in list(self.fc.named_parameters()):
            setattr(self.fc, name, torch.nn.Parameter(weights[f"fc.{name}"], requires_grad=False))
        self.output_norm = norm("hidden_norm.weight") if draft.family == DFLASH else torch.nn.Identity()

    def forward(self, states: Tensor) -> Tensor:
        """[rows, layers * hidden size] -> [rows, width]."""
        if self.input_norms:
            parts = states.chunk(len(self.input_norms), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.input_norms, parts, strict=True)], dim=-1)
        features: Tensor = self.output_norm(self.fc(states))
        return features


def read_feature_spec(path: str | Path, target_path: str | Path, kind: str) -> FeatureSpec:
    """The features that the drafter in `path` reads; for the target's process. Raises as `read_published`."""
    return read_published(path, target_path, kind).feature_spec()


def read_published(path: str | Path, target_path: str | Path, kind: str) -> PublishedDraft:
    """Read the drafter of this kind (one of `KINDS`) in a folder or hub name; weights stay in their mapped files.

    Raises `ConfigError` for files that are missing or damaged, `UnsupportedModelError` for a drafter of another kind,
    or one that was made for another target.
    """
    folder = find_checkpoint(path)
    with one_line_errors(path, CONFIG):
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    target = load_config(target_path).get_text_config(decoder=True)
    with one_line_errors(path):
        draft = _read(path, settings, target_path, target)
        if (found := KINDS[draft.family]) != kind:
            raise UnsupportedModelError(f"drafter={kind}: {path} holds one for drafter={found}")
        for difference in _differences(draft, folder):
            raise UnsupportedModelError(f"drafter {path}: made for another target: {difference}")
        _check_vocabulary(draft)
    return draft


def _read(path: str | Path, settings: Mapping[str, Any], target_path: str | Path, target: Any) -> PublishedDraft:
    """The drafter, whatever target it was made for."""
    stored = read_head(path)
    family = _family(path, settings, stored)
    weights = {_canonical(name, family): tensor for name, tensor in stored.items() if not _is_copy(name)}
    if missing := [name for name in _NEEDED[family] if name not in weights]:
        raise ConfigError(f"drafter {path}: lacks weights, {missing[0]} among them")
    config = None if family == MEDUSA else _layer_config(path, settings, weights, target)
    layers = _feature_layers(path, family, settings, int(target.num_hidden_layers))
    return PublishedDraft(path, family, settings, config, weights, target_path, target, layers)


def target_weight(path: str | Path, name: str) -> Tensor:
    """The embedding or the head of the target; no other weight is read from its files."""
    stored = open_checkpoint(path)
    found = [tensor for each, tensor in stored.items() if each.endswith(name.removeprefix("model."))]
    if not found and name == HEAD:  # tied
        return target_weight(path, EMBEDDING)
    if len(found) != 1:
        raise ConfigError(f"model {path}: no {name} in its *.safetensors files")
    return found[0]


def _family(path: str | Path, settings: Mapping[str, Any], stored: Mapping[str, Tensor]) -> str:
    """The family that the files are of. Raises `UnsupportedModelError` for none that is computed here."""
    if (kind := settings.get(_SPECULATORS_TYPE)) is not None:
        if kind in (EAGLE3, DFLASH):
            return str(kind)
        raise UnsupportedModelError(f"drafter {path}: {_SPECULATORS_TYPE}={kind}; allowed: {EAGLE3} or {DFLASH}")
    bare = {name.removeprefix("model.").removeprefix("medusa_head.") for name in stored}
    if any(re.fullmatch(r"\d+\.\d+\.(linear\.)?weight", name) for name in bare):
        return MEDUSA
    if "fc.weight" in bare and any(name.startswith(("midlayer.", "layers.0.")) for name in bare):
        if "dflash_config" in settings or "target_layer_ids" in settings:
            return DFLASH
        if any(name.startswith("midlayer.") or name.endswith("hidden_norm.weight") for name in bare):
            return EAGLE3
        return EAGLE
    raise UnsupportedModelError(f"drafter {path}: its weights are in no layout of EAGLE, Medusa or DFlash")


def _is_copy(name: str) -> bool:
    return any(part in name for part in _COPIES_OF_TARGET)


def _canonical(name: str, family: str) -> str:
    """The name of a weight in `PublishedDraft.weights`."""
    name = name.removeprefix("model.")
    if family == MEDUSA:
        return name.removeprefix("medusa_head.")
    if family == EAGLE3:
        name = re.sub(r"^midlayer\.", "layers.0.", name)
        name = re.sub(r"^layers\.0\.hidden_norm\.", "hidden_norm.", name)
    return f"model.{name}" if name.startswith(("layers.", "embed_tokens.", "norm.")) else name


def _layer_config(path: str | Path, settings: Mapping[str, Any], weights: Mapping[str, Tensor], target: Any) -> Any:
    """The configuration of the layers; it takes as long sequences as the target where it can."""
    sizes = settings.get("transformer_layer_config", settings) if _SPECULATORS_TYPE in settings else settings
    num_layers = 1 + max(int(found[1]) for found in map(_LAYER.match, weights) if found)
    has_norms = "model.layers.0.self_attn.q_norm.weight" in weights
    stated = sizes.get("model_type")
    model_type = stated if stated in MODEL_TYPES else ("qwen3" if has_norms else "llama")
    kept = {key: value for key, value in sizes.items() if key not in _NOT_OF_LAYERS}
    if kept.get("layer_types"):
        kept["layer_types"] = kept["layer_types"][:num_layers]
    fixed = {"model_type": model_type, "num_hidden_layers": num_layers, "vocab_size": target.vocab_size}
    with one_line_errors(path, CONFIG):
        config = ModelConfig({**kept, **fixed, "tie_word_embeddings": False})
    if config.rope_parameters["rope_type"] in ("default", "llama3"):  # whose angles do not depend on it
        longest = getattr(target, "max_position_embeddings", None) or 0
        config.max_position_embeddings = max(config.max_position_embeddings, longest)
    return config


def _feature_layers(path: str | Path, family: str, settings: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The states that features are made of, as indices of `hidden_states`."""
    if family in (EAGLE, MEDUSA):
        return (num_layers,)
    own, offset = None, 0
    if family == EAGLE3:
        own = settings.get("eagle_aux_hidden_state_layer_ids", settings.get("aux_hidden_state_layer_ids"))
        nested = (settings.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        if own is None and nested is not None:
            own, offset = nested, 1  # counts outputs of layers
        if own is None:
            own = (2, num_layers // 2, num_layers - 3)
    elif _SPECULATORS_TYPE in settings:
        own = settings.get("aux_hidden_state_layer_ids")
        own = (2, num_layers // 2, num_layers - 3) if own is None else own
    else:
        own = (settings.get("dflash_config") or {}).get("target_layer_ids", settings.get("target_layer_ids"))
        offset = 1
    if not isinstance(own, Sequence) or not own or not all(isinstance(index, int) for index in own):
        raise ConfigError(f"drafter {path}: {CONFIG} does not say which layers of the target it reads")
    return tuple(index + offset for index in own)


def _differences(draft: PublishedDraft, folder: Path) -> Iterator[str]:
    """How the target that it was made for differs from this one, in one line each."""
    weights, settings = draft.weights, draft.settings
    width, vocab_size = int(draft.target.hidden_size), int(draft.target.vocab_size)
    if min(draft.feature_layers) < 0 or max(draft.feature_layers) > draft.target.num_hidden_layers:
        yield f"it reads states {list(draft.feature_layers)}, and this one has {draft.target.num_hidden_layers} layers"
    if draft.family == MEDUSA:
        return
    taken = int(weights["fc.weight"].shape[1])
    given = width * (2 if draft.family == EAGLE else len(draft.feature_layers))
    if taken != given:
        yield f"its fc takes {taken} numbers, and this one gives {given}"
    sizes = {len(weights[name]) for name in (EMBEDDING, "t2d") if name in weights}
    layers = settings.get("transformer_layer_config", settings) if _SPECULATORS_TYPE in settings else settings
    own = len(weights["d2t"]) if "d2t" in weights else None  # which some files give as vocab_size
    if not sizes and layers.get("vocab_size") not in (None, own):
        sizes = {int(layers["vocab_size"])}
    if sizes - {vocab_size}:
        yield f"that had {max(sizes - {vocab_size})} token ids, and this one has {vocab_size}"
    file = folder / "tokenizer.json"
    if file.is_file() and read_fingerprint(file) != load_tokenizer(draft.target_path).fingerprint:
        yield "its tokenizer differs from the target's"


def _check_vocabulary(draft: PublishedDraft) -> None:
    """Raise `ConfigError` unless each column of the head scores a token of its own."""
    vocab_size, own = int(draft.target.vocab_size), draft.weights.get(HEAD)
    ids = torch.arange(vocab_size) if draft.output_ids is None else draft.output_ids
    in_range = int(ids[0]) >= 0 and int(ids[-1]) < vocab_size and bool((ids.diff() > 0).all())
    if not in_range or (own is not None and len(own) != len(ids)):
        raise ConfigError(
            f"drafter {draft.path}: its head and d2t do not score ascending tokens of the target's {vocab_size}"
        )


def check_options(draft: PublishedDraft, options: LoadOptions) -> None:
    """Raise `UnsupportedModelError` for a drafter that is not computed like this; before any weight is read."""
    if draft.config is None:
        if options.dtype == INT8 and (reason := why_not_int8(torch.device(options.device))) is not None:
            raise UnsupportedModelError(f"dtype=int8: there are no fast int8 products: {reason}")
        prepare_device(options.device)
        return
    if not draft.config.is_covered():
        raise UnsupportedModelError(f"drafter {draft.path}: amusd's decoder does not compute its layers")
    prepare(draft.config, options)


def layer_shapes(draft: PublishedDraft) -> dict[str, tuple[int, ...]]:
    """`weight_shapes` of the layers, with a head of the drafter's columns."""
    return {**weight_shapes(draft.config), HEAD: tuple(draft.head().shape)}
