"""The draft of the embedded target: layers trained for it (`experiments/embedded_draft/`), its own embedding and head.

Only the layers, the final norm and the list of tokens that the draft can propose ship with the package. The embedding
and the head's rows for those tokens are the target's, so tokenizers agree by construction; a whole head would cost more
than the layers.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amusd.errors import ConfigError
from amusd.models.attention import register_attention
from amusd.models.cached_model import CachedModel
from amusd.models.compatibility import check_supported
from amusd.models.draft_file import DraftWeights, read_draft
from amusd.models.huggingface import (
    causal_class,
    load_config,
    loaded_dtype,
    quiet_transformers,
    uses_decoder,
    wrap_model,
)
from amusd.models.load_options import LoadOptions

DRAFT_FILE = Path(__file__).parents[1] / "embedded" / "draft.safetensors"
"""The draft that ships with the package; its card stands beside it."""
DRAFT_DIGEST = "90c1d051d946587cbf77db08c5e187576d51773cbd99cbb10d1917edb5b7a824"
"""Its checksum (`digest_of`), so that no flipped bit of it is run."""
MODEL_CARD = DRAFT_FILE.with_name("README.md")

_EMBEDDING = "model.embed_tokens.weight"
_FROM_TARGET = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def load_embedded_draft(
    path: str | Path,
    options: LoadOptions,
    *,
    vocab_size: int,
    draft_file: Path = DRAFT_FILE,
) -> CachedModel:
    """Load the draft for the target in folder `path`, with a head of its `vocab_size` most frequent tokens.

    The model's `output_ids` say which token each column of its logits scores. Raises `ConfigError` if the draft has
    fewer tokens or its file is damaged, `UnsupportedModelError` as `load_model`.
    """
    draft = read_draft(draft_file, DRAFT_DIGEST if draft_file == DRAFT_FILE else None)
    if vocab_size > len(draft.output_ids):
        raise ConfigError(
            f"drafter.vocab_size={vocab_size}: the embedded draft can propose {len(draft.output_ids)} tokens"
        )
    output_ids = draft.output_ids[:vocab_size].sort().values
    model = _build(
        Path(path),
        draft,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        model_impl=options.model_impl,
    )
    _reduce_head(model, output_ids)
    return wrap_model(model, options, output_ids.to(options.device))


def make_new_folder(folder: Path) -> None:
    """An empty one. Raises `ConfigError` if it holds anything, or cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder}: not empty; name a new folder")
    except OSError as error:
        raise ConfigError(f"{folder}: {error}") from error


def export_draft(target: Path, folder: Path, draft_file: Path = DRAFT_FILE) -> None:
    """Write the draft as an ordinary transformers checkpoint, with the whole head and the target's tokenizer.

    `target` is the target's folder. Raises `ConfigError` if `folder` holds anything, or cannot be written.
    """
    draft = read_draft(draft_file, DRAFT_DIGEST if draft_file == DRAFT_FILE else None)
    make_new_folder(folder)
    try:
        model = _build(target, draft, dtype="bfloat16", max_model_len=1, model_impl="transformers")
        with quiet_transformers():
            model.save_pretrained(folder)
        for name in _FROM_TARGET:
            if (target / name).exists():
                shutil.copyfile(target / name, folder / name)
        if draft_file == DRAFT_FILE:
            shutil.copyfile(MODEL_CARD, folder / "README.md")
    except OSError as error:
        raise ConfigError(f"{folder}: {error}") from error


def _build(folder: Path, draft: DraftWeights, *, dtype: str, max_model_len: int, model_impl: str) -> Any:
    """The draft as a transformers model whose head is the target's whole one."""
    config = copy.deepcopy(load_config(folder))
    model_class = causal_class(config)
    check_supported(config, model_class, max_model_len)
    uses_decoder(config, model_impl)  # refuses before any weight is read
    assert model_class is not None  # refused above
    config.num_hidden_layers = draft.num_layers
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        config.layer_types = layer_types[: draft.num_layers]
    as_stored = loaded_dtype(dtype)
    weights = {name: tensor.to(as_stored) for name, tensor in draft.tensors.items()}
    with quiet_transformers():
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict={**weights, **_shared_weights(folder, tied=config.tie_word_embeddings)},
            dtype=as_stored,
            attn_implementation=register_attention(),
            output_loading_info=True,
        )
    if info["missing_keys"]:
        raise ConfigError(
            f"the draft and the target in {folder} do not fit together: {min(info['missing_keys'])} is missing"
        )
    return model


def _shared_weights(folder: Path, *, tied: bool) -> Mapping[str, Tensor]:
    """Embedding and head of the target; no other weight is read from the files."""
    from safetensors import safe_open

    wanted = {_EMBEDDING} if tied else {_EMBEDDING, "lm_head.weight"}
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            found.update({name: weights.get_tensor(name) for name in wanted.intersection(weights.keys())})
    if missing := wanted - set(found):
        raise ConfigError(f"model {folder}: no {min(missing)} in its *.safetensors files")
    return found


def _reduce_head(model: Any, output_ids: Tensor) -> None:
    """Replace the output head by its rows `output_ids`; the input embedding stays whole."""
    full = model.get_output_embeddings()
    hidden = full.weight.shape[1]
    head = torch.nn.Linear(hidden, len(output_ids), bias=full.bias is not None, device="meta")
    head.weight = torch.nn.Parameter(full.weight.detach()[output_ids], requires_grad=False)
    if full.bias is not None:
        head.bias = torch.nn.Parameter(full.bias.detach()[output_ids], requires_grad=False)
    model.set_output_embeddings(head)
