"""The draft of the embedded target: its layers (`experiments/embedded_draft/` trains them), and the file they ship in.

Only the layers, the final norm and the list of tokens that the draft can propose ship with the package. The embedding
and the head's rows for those tokens are the target's, so tokenizers agree by construction; a whole head would cost more
than the layers.

The file holds matrices as int8 with a scale per row, and norms as they are: eight bits a weight are enough to store a
draft (the experiment measures what they cost), and half of bfloat16. Where the CPU multiplies in int8 the model does so
(`linear.py`), elsewhere it computes with the weights that `read_draft` returns, in its own dtype.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amusd.errors import ConfigError
from amusd.files import make_new_folder
from amusd.models.attention import register_attention
from amusd.models.cached_model import CachedModel
from amusd.models.compatibility import supported_class
from amusd.models.draft_layouts import EMBEDDING, HEAD, target_weight
from amusd.models.huggingface import (
    load_config,
    loaded_dtype,
    quiet_transformers,
    set_num_layers,
    wrap_model,
)
from amusd.models.linear import to_int8
from amusd.models.load_options import LoadOptions
from amusd.models.numerics import Numerics
from amusd.models.vocabulary import reduce_head

DRAFT_FILE = Path(__file__).parents[1] / "embedded" / "draft.safetensors"
"""The draft that ships with the package; its model card stands beside it."""
VOCAB_SIZE = 8192
"""Token ids that the draft proposes, the most frequent ones; more make each step dearer than they make it right."""
MODEL_CARD = DRAFT_FILE.with_name("README.md")

_FORMAT = "amusd-draft-1"
_OUTPUT_IDS = "output_ids"
_SCALE = ".scale"
_FROM_TARGET = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def load_embedded_draft(
    path: str | Path,
    options: LoadOptions,
    *,
    vocab_size: int = VOCAB_SIZE,
    draft_file: Path = DRAFT_FILE,
) -> CachedModel:
    """Load the draft for the target in folder `path`, with a head of its `vocab_size` most frequent tokens.

    The model's `output_ids` say which token each column of its logits scores. Raises `ConfigError` if the draft has
    fewer tokens or its file is damaged, `UnsupportedModelError` as `load_model`.
    """
    draft = read_draft(draft_file)
    if vocab_size > len(draft.output_ids):
        raise ConfigError(f"vocab_size={vocab_size}: the draft can propose {len(draft.output_ids)} tokens")
    output_ids = draft.output_ids[:vocab_size].sort().values
    model = _build(Path(path), draft, options)
    reduce_head(model, output_ids)
    return wrap_model(model, options, output_ids)


def export_draft(target: Path, folder: Path, draft_file: Path = DRAFT_FILE) -> None:
    """Write the draft as an ordinary transformers checkpoint, with the whole head and the target's tokenizer.

    `target` is the target's folder. Raises `ConfigError` if `folder` holds anything, or cannot be written.
    """
    draft = read_draft(draft_file)
    make_new_folder(folder)
    try:
        numerics = Numerics(width=1, fixed=False)
        model = _build(target, draft, LoadOptions(numerics=numerics, max_model_len=1, model_impl="transformers"))
        with quiet_transformers():
            model.save_pretrained(folder)
        for name in _FROM_TARGET:
            if (target / name).exists():
                shutil.copyfile(target / name, folder / name)
        if draft_file == DRAFT_FILE:
            shutil.copyfile(MODEL_CARD, folder / "README.md")
    except OSError as error:
        raise ConfigError(f"{folder}: {error}") from error


def _build(folder: Path, draft: DraftWeights, options: LoadOptions) -> Any:
    """The draft as a transformers model with the whole head of the target."""
    config = copy.deepcopy(load_config(folder))
    model_class = supported_class(config, options.max_model_len)
    options.check(config)  # refuses before any weight is read
    set_num_layers(config, draft.num_layers)
    dtype = loaded_dtype(options.dtype)
    weights = {name: tensor.to(dtype) for name, tensor in draft.tensors.items()}
    shared = [EMBEDDING] if config.tie_word_embeddings else [EMBEDDING, HEAD]
    with quiet_transformers():
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=weights | {name: target_weight(folder, name) for name in shared},
            dtype=dtype,
            attn_implementation=register_attention(),
            output_loading_info=True,
        )
    if info["missing_keys"]:
        raise ConfigError(
            f"the draft and the target in {folder} do not fit together: {min(info['missing_keys'])} is missing"
        )
    return model


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """A draft without the embedding and the head, which it shares with its target."""

    tensors: Mapping[str, Tensor]
    """float32, under the names that `LlamaForCausalLM` gives them."""
    output_ids: Tensor
    """[vocabulary] int64: the tokens that it can propose, the most frequent first."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """How it was made, as the model card says."""

    @property
    def num_layers(self) -> int:
        """Layers of the draft."""
        return 1 + max(int(name.split(".")[2]) for name in self.tensors if name.startswith("model.layers."))


def write_draft(path: Path, draft: DraftWeights) -> None:
    """Write a draft, whole or not at all."""
    from safetensors.torch import save_file

    stored: dict[str, Tensor] = {_OUTPUT_IDS: draft.output_ids.to(torch.int32).contiguous()}
    for name, tensor in draft.tensors.items():
        if tensor.ndim == 2:
            stored[name], stored[name + _SCALE] = to_int8(tensor)
        else:
            stored[name] = tensor.float().contiguous()
    partial = path.with_suffix(".partial")
    save_file(stored, partial, metadata={"format": _FORMAT, "facts": json.dumps(dict(draft.facts))})
    partial.chmod(0o644)  # safetensors makes it private
    partial.rename(path)


def read_draft(path: Path) -> DraftWeights:
    """Read what `write_draft` wrote. Raises `ConfigError` if the file is missing, damaged or in another format."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise ConfigError(f"draft {path}: not a file of the format {_FORMAT}")
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"draft {path}: {error}") from error
    tensors = {
        name: tensor.float() * stored[name + _SCALE] if name + _SCALE in stored else tensor
        for name, tensor in stored.items()
        if name != _OUTPUT_IDS and not name.endswith(_SCALE)
    }
    return DraftWeights(tensors, stored[_OUTPUT_IDS].long(), json.loads(metadata["facts"]))
