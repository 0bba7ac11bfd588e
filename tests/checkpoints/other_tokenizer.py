"""A checkpoint once more, under other token ids and without some of the tokens: a draft with another tokenizer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = (
    "The ferry leaves in the morning and comes back in the evening. The keeper of the lighthouse wrote the weather "
    "into a book every day, and in the winter he read it to the children of the village. They liked the storms best."
)


def word_tokenizer(vocab_size: int = 340) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options = {"special_tokens": ["<eos>"], "initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, **options)
    backend.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def save_reindexed(source: Path, folder: Path, keep: Callable[[int], bool]) -> None:
    """Write the checkpoint in `source` with its token ids shuffled, and only those tokens that `keep` accepts."""
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"] | {added["content"]: added["id"] for added in tokenizer["added_tokens"]}
    order = [token_id for token_id in sorted(vocab.values()) if keep(token_id)]
    random.Random(0).shuffle(order)
    new_ids = {old: new for new, old in enumerate(order)}
    model = tokenizer["model"]
    model["vocab"] = {token: new_ids[old] for token, old in model["vocab"].items() if old in new_ids}
    pairs = [tuple(pair if isinstance(pair, list) else pair.split(" ")) for pair in model["merges"]]
    model["merges"] = [list(pair) for pair in pairs if {*pair, "".join(pair)} <= model["vocab"].keys()]
    tokenizer["added_tokens"] = [added for added in tokenizer["added_tokens"] if added["id"] in new_ids]
    for added in tokenizer["added_tokens"]:
        added["id"] = new_ids[added["id"]]
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_bytes((source / "tokenizer_config.json").read_bytes())
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    config["vocab_size"] = len(order)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if config.get(name) is not None:
            config[name] = new_ids[config[name]]
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(source / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            weights[name] = weights[name][torch.tensor(order)].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
