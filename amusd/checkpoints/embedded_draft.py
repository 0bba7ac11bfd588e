"""The draft of the embedded target. `experiments/embedded_draft/` trains it and writes its file.

The file holds the layers, the final norm and the proposable tokens; matrices are int8 with a scale per row. Embedding
and head rows are the target's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amusd.checkpoints.building import prepared
from amusd.checkpoints.checkpoint import one_line_errors, write_checkpoint
from amusd.checkpoints.configuration import ModelConfig, load_config
from amusd.checkpoints.decoder_weights import fit_weights, load_decoder, weight_shapes
from amusd.checkpoints.draft_layouts import target_weight
from amusd.checkpoints.vocabulary import EMBEDDING, HEAD, reduce_head
from amusd.errors import ConfigError
from amusd.files import make_new_folder
from amusd.runner.load_options import LoadOptions
from amusd.runner.model_runner import ModelRunner

DRAFT_FILE = Path(__file__).parents[1] / "embedded" / "draft.safetensors"
VOCAB_SIZE = 8192
"""Number of most frequent tokens that the draft proposes; a larger head costs more than it gains."""
MODEL_CARD = DRAFT_FILE.with_name("README.md")

_OUTPUT_IDS = "output_ids"
_SCALE = ".scale"
_FROM_TARGET = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def load_embedded_draft(
    path: str | Path, options: LoadOptions, *, vocab_size: int = VOCAB_SIZE, draft_file: Path = DRAFT_FILE
) -> ModelRunner:
    """Load the draft for the target in `path`, with a head of the `vocab_size` most frequent tokens.

    Raises `ConfigError` if `draft_file` is damaged, and as `load_model`.
    """
    draft = read_draft(draft_file)
    config = load_config(path, draft.num_layers)
    output_ids = draft.output_ids[:vocab_size].sort().values
    with prepared(config, options) as max_length:
        weights = _with_ends(path, draft, config)
        reduce_head(weights, output_ids)
        return ModelRunner(load_decoder(weights, config, options, max_length), options, max_length, output_ids)


def export_draft(target: Path, folder: Path) -> None:
    """Write the draft as a transformers checkpoint, with the target's whole head and tokenizer.

    Raises `ConfigError` if `folder` is not empty, or cannot be written.
    """
    draft = read_draft(DRAFT_FILE)
    make_new_folder(folder)
    try:
        config = load_config(target, draft.num_layers)
        weights = _with_ends(target, draft, config)
        if config.tie_word_embeddings:
            del weights[HEAD]
        weights = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
        write_checkpoint(folder, {**vars(config), "dtype": "bfloat16"}, weights)
        for name in _FROM_TARGET:
            if (target / name).exists():
                shutil.copyfile(target / name, folder / name)
        shutil.copyfile(MODEL_CARD, folder / "README.md")
    except OSError as error:
        raise ConfigError(f"{folder}: {error}") from error


def _with_ends(path: str | Path, draft: DraftWeights, config: ModelConfig) -> dict[str, Tensor]:
    ends = {name: target_weight(path, name) for name in (EMBEDDING, HEAD)}
    return fit_weights(f"the draft for {path}", {**draft.tensors, **ends}, weight_shapes(config))


class DraftWeights(NamedTuple):
    """A draft without embedding and head."""

    tensors: Mapping[str, Tensor]
    """float32, by the names of `LlamaForCausalLM`."""
    output_ids: Tensor
    """[vocabulary] int64: proposable tokens, the most frequent first."""
    facts: Mapping[str, Any]

    @property
    def num_layers(self) -> int:
        """Layers of the draft."""
        return 1 + max(int(name.split(".")[2]) for name in self.tensors if name.startswith("model.layers."))


def read_draft(path: Path) -> DraftWeights:
    """Read a draft. Raises `ConfigError` if the file is missing or damaged."""
    from safetensors import safe_open

    with one_line_errors(path), safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["facts"])
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    tensors = {
        name: tensor.float() * stored[name + _SCALE] if name + _SCALE in stored else tensor
        for name, tensor in stored.items()
        if name != _OUTPUT_IDS and not name.endswith(_SCALE)
    }
    return DraftWeights(tensors, stored[_OUTPUT_IDS].long(), facts)
