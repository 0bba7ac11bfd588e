"""A draft model cut out of the target's own checkpoint: its first and last layers, and the head of frequent tokens.

No training and no second download; it shares the target's tokenizer by construction. The head is reduced because it
would otherwise cost more than the layers: byte-level BPE numbers tokens in the order of their merges, so low ids are
the frequent ones.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amusd.errors import ConfigError, UnsupportedModelError
from amusd.models.attention import register_attention
from amusd.models.cached_model import CachedModel
from amusd.models.captured import Capture
from amusd.models.compatibility import check_supported
from amusd.models.huggingface import causal_class, load_config, quiet_transformers, uses_decoder, wrap_model
from amusd.models.numerics import Numerics

_LAYER = re.compile(r"^(.*\.layers\.)(\d+)(\..*)$")


def load_embedded_draft(
    path: str | Path,
    *,
    num_layers: int,
    vocab_size: int,
    numerics: Numerics,
    max_model_len: int,
    dtype: str = "bfloat16",
    device: str = "cpu",
    model_impl: str = "auto",
    capture: Capture | None = None,
    tokens_per_step: int = 1,
) -> CachedModel:
    """Load `num_layers` layers of the checkpoint in folder `path`, with a head of at most `vocab_size` tokens.

    The model's `output_ids` say which token each column of its logits scores. Raises `ConfigError` if the checkpoint
    has fewer layers, `UnsupportedModelError` as `load_model`, and if its layers cannot be told apart by name.
    """
    folder = Path(path)
    config = load_config(folder)
    model_class = causal_class(config)
    check_supported(config, model_class, max_model_len)
    uses_decoder(config, model_impl)  # refuses before any weight is read
    assert model_class is not None  # refused above
    kept = kept_layers(num_layers, config.num_hidden_layers)
    weights = dict(_read_weights(folder, kept))
    if not any(_LAYER.match(name) for name in weights):
        raise UnsupportedModelError(f"model type '{config.model_type}': its layers are not named, so none can be kept")
    with quiet_transformers():
        model, info = model_class.from_pretrained(
            None,
            config=_cut_config(config, kept),
            state_dict=weights,
            dtype=getattr(torch, dtype),
            attn_implementation=register_attention(),
            output_loading_info=True,
        )
    if info["missing_keys"]:
        raise ConfigError(f"model {path}: the checkpoint lacks weights, {min(info['missing_keys'])} among them")
    output_ids = torch.tensor(frequent_ids(vocab_size, config.get_text_config().vocab_size, _special_ids(folder)))
    _reduce_head(model, output_ids)
    return wrap_model(
        model,
        numerics=numerics,
        max_model_len=max_model_len,
        device=device,
        output_ids=output_ids.to(device),
        model_impl=model_impl,
        capture=capture,
        tokens_per_step=tokens_per_step,
    )


def kept_layers(num_layers: int, available: int) -> tuple[int, ...]:
    """Indices of the first `num_layers` of `available` layers. `ConfigError` if there are fewer.

    Untrained, the last layers cannot read what the first ones write: measured on the embedded target's own greedy text,
    layer 0 alone predicts 7 % of its tokens, layers 0 and 1 predict 5 %, and up to eight layers that end with 29 none.
    """
    if not 1 <= num_layers <= available:
        raise ConfigError(f"drafter.num_layers={num_layers}: the target has {available} layers")
    return tuple(range(num_layers))


def frequent_ids(vocab_size: int, available: int, special: Iterable[int]) -> list[int]:
    """`vocab_size` ids in ascending order: all of `special`, then the lowest of the others."""
    chosen = {token_id for token_id in special if token_id < available}
    for token_id in range(available):
        if len(chosen) >= vocab_size:
            break
        chosen.add(token_id)
    return sorted(chosen)


def _cut_config(config: Any, kept: tuple[int, ...]) -> Any:
    cut = copy.deepcopy(config)
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        cut.layer_types = [layer_types[layer] for layer in kept]
    cut.num_hidden_layers = len(kept)
    return cut


def _read_weights(folder: Path, kept: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
    """The weights that the draft needs, under their new names; no other is read from the files."""
    from safetensors import safe_open

    new_index = {old: new for new, old in enumerate(kept)}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model {folder}: no *.safetensors file in this folder")
    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a mapping
                match = _LAYER.match(name)
                if match is None:
                    yield name, weights.get_tensor(name)
                elif int(match[2]) in new_index:
                    yield f"{match[1]}{new_index[int(match[2])]}{match[3]}", weights.get_tensor(name)


def _reduce_head(model: Any, output_ids: Tensor) -> None:
    """Replace the output head by its rows `output_ids`; the input embedding stays whole."""
    full = model.get_output_embeddings()
    hidden = full.weight.shape[1]
    head = torch.nn.Linear(hidden, len(output_ids), bias=full.bias is not None, device="meta")
    head.weight = torch.nn.Parameter(full.weight.detach()[output_ids], requires_grad=False)
    if full.bias is not None:
        head.bias = torch.nn.Parameter(full.bias.detach()[output_ids], requires_grad=False)
    model.set_output_embeddings(head)


def _special_ids(folder: Path) -> set[int]:
    """End-of-sequence ids and those added tokens that the chat template writes."""
    from amusd.models.tokenizer import load_tokenizer

    ids = set(load_tokenizer(folder).eos_token_ids)
    template = folder / "chat_template.jinja"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    text = template.read_text() if template.exists() else str(settings.get("chat_template") or "")
    tokenizer_file = folder / "tokenizer.json"
    added = json.loads(tokenizer_file.read_text())["added_tokens"] if tokenizer_file.exists() else []
    return ids | {entry["id"] for entry in added if entry["content"] in text}
