"""Folders and names that hold no checkpoint, or a damaged one: one line says what is wrong with which file.

Every one is loaded as a target and as a draft, by the functions that the workers call.
"""

from __future__ import annotations

import json
import os
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

from amusd.commands.doctor import _guard, _models
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


def pointer(name: str) -> Damage:
    return text(name, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def without(*names: str) -> Damage:
    return lambda folder: [(folder / name).unlink() for name in names]


def with_others(*others: str) -> Damage:
    """Nothing but these files."""

    def change(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        for name in others:
            (folder / name).write_text("{}")

    return change


def renamed(name: str, other: str) -> Damage:
    return lambda folder: (folder / name).rename(folder / other)


def directory(name: str) -> Damage:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def dangling(name: str) -> Damage:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to("../blobs/gone")

    return change


def below(folder: Path) -> None:
    parts = list(folder.iterdir())
    (folder / "main").mkdir()
    for part in parts:
        part.rename(folder / "main" / part.name)


def half(name: str) -> Damage:
    return lambda folder: (folder / name).write_bytes(
        (folder / name).read_bytes()[: (folder / name).stat().st_size // 2]
    )


def index_of(*files: object) -> Damage:
    def change(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        weight_map = {f"weight {number}": file for number, file in enumerate(files)}
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return change


BROKEN: Mapping[str, tuple[Damage, str]] = {
    "no config.json": (without("config.json"), r"no config\.json in it$"),
    "everything one folder below": (below, r"no config\.json in it; did you mean .*/main\?$"),
    "nothing": (with_others(), r"no config\.json in it$"),
    "an empty config.json": (text("config.json", ""), "config.json: "),
    "a config.json that is no JSON": (text("config.json", "model_type: llama"), "config.json: "),
    "a config.json that is no text": (text("config.json", b"\xff\xfe\x00"), "config.json: "),
    "a config.json with a list": (text("config.json", "[]"), "config.json: "),
    "a config.json that is a folder": (directory("config.json"), r"no config\.json in it$"),
    "a config.json that says nothing": (text("config.json", "{}"), "config.json: .*model_type"),
    "an unknown kind of model": (setting(model_type="perceptron"), "config.json: .*perceptron"),
    "a kind of model that is a number": (setting(model_type=5), "config.json: "),
    "a size that is a word": (setting(hidden_size="wide"), "hidden_size"),
    "no heads": (setting(num_attention_heads=0, head_dim=None), ""),
    "no layers": (setting(num_hidden_layers=0), ""),
    "heads that do not divide the width": (setting(num_attention_heads=5, head_dim=None), ""),
    "more layers than there are": (setting(num_hidden_layers=3), r"lacks weights, model\.layers\.2\."),
    "another width than there is": (setting(intermediate_size=64), r"has shape \[48, 32\], and config.json asks"),
    "an unknown activation": (setting(hidden_act="swoosh"), "swoosh"),
    "an unknown rope": (setting(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}), "spiral"),
    "a dtype that nobody knows": (setting(dtype="float99"), "float99"),
    "a torch_dtype that nobody knows": (setting(dtype=None, torch_dtype="float99"), "float99"),
    "AWQ": (
        setting(quantization_config={"quant_method": "awq", "bits": 4}),
        "its quantization: ImportError: .*gptqmodel",
    ),
    "a quantization that is a word": (setting(quantization_config="awq"), "config.json: "),
    "a quantization of nonsense": (
        setting(quantization_config={"quant_method": "compressed-tensors", "config_groups": [1]}),
        "its quantization: ",
    ),
    "a pointer for config.json": (pointer("config.json"), "config.json is a pointer of Git LFS; .*: git lfs pull$"),
    "a pointer for the weights": (pointer(WEIGHTS), f"{WEIGHTS} is a pointer of Git LFS"),
    "a pointer for the tokenizer": (pointer("tokenizer.json"), "tokenizer.json is a pointer of Git LFS"),
    "weights that are cut short": (half(WEIGHTS), f"{WEIGHTS} is damaged or cut short: "),
    "empty weights": (text(WEIGHTS, ""), f"{WEIGHTS} is damaged or cut short: "),
    "weights that are something else": (text(WEIGHTS, b"\xff" * 4096), f"{WEIGHTS} is damaged or cut short: "),
    "weights that are a folder": (directory(WEIGHTS), f"{WEIGHTS} "),
    "weights that are a link to nowhere": (dangling(WEIGHTS), rf"{WEIGHTS} is a link to \.\./blobs/gone, which is not"),
    "no weights": (without(WEIGHTS), f"no {WEIGHTS} and no {WEIGHTS}.index.json in it$"),
    "pickled weights": (
        renamed(WEIGHTS, "pytorch_model.bin"),
        r"in it; convert pytorch_model\.bin: python -c \"from transformers import .*save_pretrained\('.*/model'\)\"$",
    ),
    "an adapter": (
        with_others("adapter_config.json", "adapter_model.safetensors"),
        "a LoRA adapter, .*merge_and_unload",
    ),
    "an adapter beside a configuration": (renamed(WEIGHTS, "adapter_model.safetensors"), "a LoRA adapter: .*merge_and"),
    "GGUF": (with_others("model.Q4_K_M.gguf", "README.md"), "GGUF files, which are not run; use the checkpoint in"),
    "GGUF beside a configuration": (renamed(WEIGHTS, "model.gguf"), "GGUF files are not run: use the checkpoint in"),
    "an index of files that are not there": (
        index_of("model-1.safetensors"),
        "no model-1.safetensors, which its index",
    ),
    "an index of numbers": (index_of(1, 2), "no 1, which its index names"),
    "an index that is no JSON": (
        lambda folder: (without(WEIGHTS)(folder), text(f"{WEIGHTS}.index.json", "{")(folder)),
        "index.json is damaged: ",
    ),
    "a weight of another shape": (
        tensors(lambda weights: weights.update({"model.norm.weight": torch.ones(31)})),
        r"model.norm.weight has shape \[31\], and config.json asks for \[32\]$",
    ),
    "a head that is not stored, nor tied": (
        tensors(lambda weights: weights.pop("lm_head.weight")),
        r"lacks weights, lm_head\.weight among them$",
    ),
    "no tokenizer": (without("tokenizer.json", "tokenizer_config.json"), r"no tokenizer in it \(tokenizer.json\)"),
    "no tokenizer.json": (without("tokenizer.json"), r"no tokenizer in it \(tokenizer.json\)"),
    "a tokenizer that is cut short": (half("tokenizer.json"), "its tokenizer cannot be loaded: "),
    "an empty tokenizer": (text("tokenizer.json", ""), "its tokenizer cannot be loaded: "),
    "a tokenizer of something else": (text("tokenizer.json", "{}"), "its tokenizer cannot be loaded: "),
    "a tokenizer that is a folder": (directory("tokenizer.json"), "its tokenizer cannot be loaded: "),
    "a damaged tokenizer_config.json": (half("tokenizer_config.json"), "its tokenizer cannot be loaded: "),
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
def test_nothing_is_wrong_with_what_the_damages_are_done_to(load: Callable[[str], None], folder: Path) -> None:
    load(str(folder))


@pytest.mark.parametrize("damage", [half(WEIGHTS), setting(hidden_act="swoosh"), half("tokenizer.json")])
def test_the_doctor_says_the_same(damage: Damage, folder: Path) -> None:
    damage(folder)
    config = EngineConfig(target=TargetConfig(kind="hf", model=str(folder)), drafters=(DrafterConfig(kind="ngram"),))
    (finding,) = _guard("models", _models(config))
    assert (finding.ok, finding.text) == (False, refusal(as_target, folder))


@LOADERS
def test_a_path_that_is_no_folder_is_one_line(load: Callable[[str], None], folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to("gone")
    assert "a GGUF file, which is not run; name the folder" in refusal(load, tmp_path / "model.gguf")
    assert ": a file; name the folder of a checkpoint" in refusal(load, folder / WEIGHTS)
    assert "symbolic links" in refusal(load, tmp_path / "loop")
    assert "name too long" in refusal(load, "m" * 256)
    for name in (tmp_path / "nowhere", tmp_path / "gone", "./gone", "~/gone/for/good", "~nobody-of-this-name/model"):
        line = refusal(load, name)
        assert line.endswith(": no such folder") or "home directory" in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@LOADERS
def test_what_may_not_be_read_is_one_line(load: Callable[[str], None], folder: Path) -> None:
    for name in (WEIGHTS, "tokenizer.json", "config.json", "."):
        (folder / name).chmod(0)
        assert "denied" in refusal(load, folder)
    folder.chmod(0o700)


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
    assert "no such folder, and the model hub does not answer (" in line
    assert "`hf download someone/something`" in line
    assert line.endswith("HF_HUB_OFFLINE=1")
    assert len(tries) == len(set(tries)), "an address was tried again"


@LOADERS
def test_offline_a_model_that_was_not_fetched_is_one_line(
    load: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "and HF_HUB_OFFLINE=1 forbids to fetch it; name a folder, or unset" in refusal(load, "someone/something")


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
