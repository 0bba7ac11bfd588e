"""Checkpoints as they are published: several files, tied heads, stretched positions, and files that are damaged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models.blocks import random_ids, stock_logits
from models.published import CONFIGS, ORIGINAL, change_weights, write, write_config
from passes import forward

from amusd.errors import ConfigError
from amusd.models.cached_model import CachedModel
from amusd.models.checkpoint import open_checkpoint
from amusd.models.huggingface import load_model
from amusd.models.load_options import LoadOptions
from amusd.models.numerics import Numerics

RULE = Numerics(width=8, fixed=True, border=32, prefill_chunk=32)
LENGTH = 3 * ORIGINAL
"""Beyond the original positions of every stretched one."""


def load(folder: Path | str, dtype: str = "float32", **options: Any) -> CachedModel:
    return load_model(folder, LoadOptions(numerics=RULE, max_model_len=LENGTH, dtype=dtype, **options))


def last_logits(model: CachedModel, token_ids: list[int], rows: int = 8) -> torch.Tensor:
    """[rows, vocab] at the end of `token_ids`."""
    cache = model.new_cache(len(token_ids))
    model.prefill(token_ids[:-rows], cache)
    return torch.cat([forward(model, [token_id], cache).logits for token_id in token_ids[-rows:]])


HEAD, EMBEDDING = "lm_head__weight", "model__embed_tokens__weight"


@pytest.mark.parametrize("change", ["no head", "the same head", "another head", "the head alone"])
def test_a_tied_head_is_what_transformers_takes_it_for(change: str, tmp_path: Path) -> None:
    stock = write(tmp_path, CONFIGS["Llama 3.2"], shard="1GB")
    file = tmp_path / "model.safetensors"
    embedding = stock.get_input_embeddings().weight.detach().clone()
    if change == "the head alone":
        change_weights(file, **{EMBEDDING: None, HEAD: embedding})
    elif change != "no head":
        change_weights(file, **{HEAD: embedding if change == "the same head" else embedding.flip(0).contiguous()})
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    model, token_ids = load(tmp_path), random_ids(20)
    torch.testing.assert_close(last_logits(model, token_ids), stock_logits(expected, token_ids)[-8:])
    assert model.parameter_bytes - model.weight_bytes == (embedding.nbytes if change == "another head" else 0)


def test_a_checkpoint_of_the_model_without_a_head_is_read_if_the_head_is_tied(tmp_path: Path) -> None:
    stock = write(tmp_path, CONFIGS["Qwen3 with yarn"], shard="1GB")
    stock.base_model.save_pretrained(tmp_path)  # its names have no prefix, as those of Qwen3-Embedding
    write_config(tmp_path, CONFIGS["Qwen3 with yarn"])
    assert "embed_tokens.weight" in open_checkpoint(tmp_path)
    token_ids = random_ids(20)
    torch.testing.assert_close(
        last_logits(load(tmp_path), token_ids), stock_logits(stock, token_ids)[-8:], atol=1e-4, rtol=1e-4
    )


def test_of_a_model_on_the_hub_the_weights_that_its_index_names_are_fetched_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = write(tmp_path / "hub", CONFIGS["Llama 3.2"])
    asked = []

    def snapshot_download(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        (tmp_path / "cache").mkdir(exist_ok=True)
        for file in (tmp_path / "hub").iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                shutil.copy(file, tmp_path / "cache")
        return str(tmp_path / "cache")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    name = "someone/fetched"
    checkpoint = open_checkpoint(name)
    assert set(checkpoint) == {name for name, _ in stock.named_parameters()}
    open_checkpoint(name)
    texts, weights = asked
    assert "*.json" in texts
    assert not any("safetensors" in pattern for pattern in texts)
    assert weights == sorted(file.name for file in (tmp_path / "hub").glob("*.safetensors"))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


SHARD, INDEX = "model-00002-of-*.safetensors", "model.safetensors.index.json"
DAMAGES = {
    "a file that is cut short": (SHARD, cut, r"model-00002-of-\d+.safetensors: SafetensorError: "),
    "a damaged index": (INDEX, cut, "index.json: "),
    "a missing file": (SHARD, Path.unlink, r"model-00002-of-\d+.safetensors: No such file"),
    "no index": (INDEX, Path.unlink, "none of model.safetensors, model.safetensors.index.json in it; "),
}


@pytest.mark.parametrize(("pattern", "damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_what_is_wrong_with_a_file_is_one_line(pattern: str, damage: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path, CONFIGS["Llama 3.1"])
    damage(next(tmp_path.glob(pattern)))
    with pytest.raises(ConfigError, match=rf"^model {tmp_path}: .*{message}") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("model_impl", "dtype"), [("amusd", torch.float8_e4m3fn), ("transformers", torch.int8)])
def test_quantized_weights_that_no_setting_explains_are_refused(
    dtype: torch.dtype, model_impl: str, tmp_path: Path
) -> None:
    stock = write(tmp_path, CONFIGS["Llama 3.1"], shard="1GB")
    weight = stock.base_model.layers[1].mlp.up_proj.weight.detach().to(dtype)
    change_weights(tmp_path / "model.safetensors", model__layers__1__mlp__up_proj__weight=weight)
    with pytest.raises(ConfigError, match=r"1.mlp.up_proj.weight is stored as \w+, and config.json says"):
        load(tmp_path, model_impl=model_impl)
