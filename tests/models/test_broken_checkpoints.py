"""Folders and names that hold no checkpoint, or a damaged one: one line says what is wrong with which file.

Every one is loaded as a target and as a draft, by the functions that the workers call.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from models import tiny
from safetensors.torch import load_file, save_file

from amusd.config import DrafterConfig, EngineConfig, TargetConfig
from amusd.drafters.factory import load_drafters
from amusd.errors import ConfigError
from amusd.models.huggingface import device_errors
from amusd.models.loading import load_target

WEIGHTS = "model.safetensors"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that nothing is wrong with."""
    folder = tmp_path_factory.mktemp("whole")
    tokenizer = tiny.byte_tokenizer()
    config = tiny.tiny_config(vocab_size=len(tokenizer), tie_word_embeddings=False)
    tiny.save_checkpoint(folder, config, tokenizer)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    shutil.copytree(whole, tmp_path / "model")
    return tmp_path / "model"


def as_target(model: str) -> None:
    load_target(EngineConfig(target=TargetConfig(kind="hf", model=model)), "cpu")


def as_draft(model: str) -> None:
    target = TargetConfig(kind="hf", model=model)  # of the same tokenizer
    load_drafters(EngineConfig(target=target, drafters=(DrafterConfig(kind="hf", model=model),)), "cpu")


LOADERS = pytest.mark.parametrize("load", [as_target, as_draft])


def setting(**changes: Any) -> Damage:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def text(name: str, content: str | bytes) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def without(*names: str) -> Damage:
    return lambda folder: [(folder / name).unlink() for name in names]


def half(name: str) -> Damage:
    return lambda folder: (folder / name).write_bytes(
        (folder / name).read_bytes()[: (folder / name).stat().st_size // 2]
    )


BROKEN: Mapping[str, tuple[Damage, str]] = {
    "no config.json": (without("config.json"), r"no config\.json in it; a checkpoint is config\.json, \*\.safetensors"),
    "a config.json that is no text": (text("config.json", b"\xff\xfe\x00"), "config.json: "),
    "an unknown kind of model": (setting(model_type="perceptron"), "config.json: .*perceptron"),
    "a size that is a word": (setting(hidden_size="wide"), "hidden_size"),
    "more layers than there are": (setting(num_hidden_layers=3), r"lacks weights, model\.layers\.2\."),
    "another width than there is": (setting(intermediate_size=64), r"has shape \[48, 32\], and config.json asks"),
    "AWQ": (
        setting(quantization_config={"quant_method": "awq", "bits": 4}),
        "ImportError: .*gptqmodel",
    ),
    "weights that are a pointer of Git LFS": (text(WEIGHTS, "version https://git-lfs.github.com/spec/v1\n"), WEIGHTS),
    "weights that are cut short": (half(WEIGHTS), f"{WEIGHTS}: "),
    "no weights": (without(WEIGHTS), f"none of {WEIGHTS}, {WEIGHTS}.index.json in it; a checkpoint is"),
    "a head that is not stored, nor tied": (
        tensors(lambda weights: weights.pop("lm_head.weight")),
        r"lacks weights, lm_head\.weight among them$",
    ),
    "no tokenizer": (
        without("tokenizer.json", "tokenizer_config.json"),
        r"no tokenizer.json in it; copy that of its base model",
    ),
    "a tokenizer that is cut short": (half("tokenizer.json"), "its tokenizer cannot be loaded: "),
    "a tokenizer of a larger model": (
        lambda folder: (
            setting(vocab_size=97)(folder),
            tensors(lambda weights: weights.update({name: weights[name][:97].clone() for name in EMBEDDINGS}))(folder),
        ),
        "its tokenizer has 256 tokens, and config.json says vocab_size=97$",
    ),
    "a damaged generation_config.json": (text("generation_config.json", '{"eos_'), "generation_config.json: "),
}
EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")


def refusal(load: Callable[[str], None], model: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(str(model))
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 700
    assert line.startswith(f"model {model}: ")
    return line


@LOADERS
@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN)
def test_what_is_wrong_with_a_checkpoint_is_one_line(
    damage: Damage, message: str, load: Callable[[str], None], folder: Path
) -> None:
    damage(folder)
    line = refusal(load, folder)
    assert re.search(message, line), line


@LOADERS
def test_a_path_that_is_no_folder_is_one_line(load: Callable[[str], None], folder: Path, tmp_path: Path) -> None:
    assert ": a file, no folder; a checkpoint is" in refusal(load, folder / WEIGHTS)
    for name in (tmp_path / "gone", "./gone", "~nobody-of-this-name/model", "m" * 256):
        refusal(load, name)


def test_a_home_directory_may_be_named_by_a_tilde(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    as_target("~/model")


@LOADERS
def test_a_hub_that_does_not_answer_is_asked_once(
    load: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def refuse(self: socket.socket, address: Any) -> None:
        tries.append(address)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    line = refusal(load, "someone/something")
    assert "no such folder, and the hub does not give it (" in line
    assert "`hf download someone/something`" in line
    assert len(tries) == len(set(tries)), "an address was tried again"


@LOADERS
def test_a_hub_that_does_not_answer_is_not_needed_for_what_was_fetched(
    load: Callable[[str], None], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: socket.socket, address: Any) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    name = f"someone/{load.__name__}"
    fetched = tmp_path / f"models--someone--{load.__name__}"
    (fetched / "refs").mkdir(parents=True)
    (fetched / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, fetched / "snapshots" / ("0" * 40))
    load(name)


def test_a_device_without_memory_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^device cpu: out of memory; .*") as caught, device_errors("cpu"):
        torch.empty(1 << 50)
    assert "\n" not in str(caught.value)


def test_a_model_without_a_chat_template_says_so(folder: Path) -> None:
    lines: list[str] = []
    load_target(EngineConfig(target=TargetConfig(kind="hf", model=str(folder))), "cpu", lines.append)
    assert lines[1:] == [f"model {folder}: has no chat template (a base model?), so it is given prompts as they are"]
