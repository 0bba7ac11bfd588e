"""The scripts that train drafters on the embedded target: what they unroll, and every method on a tiny target."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
FOLDERS = (EXPERIMENTS / "drafters", EXPERIMENTS / "embedded_draft")
OURS = ("layouts", "networks", "train_drafter")
MODULES = ("dataset", "losses", "progress", "student", "teacher", "train", *OURS)
HIDDEN, LAYERS, VOCABULARY, KNOWN = 32, 8, 96, 24


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    before = list(sys.path)
    sys.path[:0] = map(str, FOLDERS)
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path[:] = before
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(requires_grad=False)


@pytest.fixture
def text(
    scripts: dict[str, ModuleType], target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    random = np.random.default_rng(0)
    length = random.integers(24, 40, 20)
    token_ids = random.integers(17, VOCABULARY, (20, 40))
    answer = np.broadcast_to(np.arange(40) >= 10, (20, 40)) & (np.arange(40) < length[:, None])
    found = scripts["dataset"].Text(token_ids, length, answer, np.ones(20, np.float32), 4)
    scripts["dataset"].write_text(tmp_path / "text.npz", found)
    monkeypatch.setattr(scripts["train_drafter"], "load_teacher", lambda device: target)
    monkeypatch.setattr(scripts["train_drafter"], "HELD_OUT_ROWS", 4)
    return tmp_path / "text.npz"


def call(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *positional: str, **options: object) -> None:
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    monkeypatch.setattr(sys, "argv", [script.__name__, *positional, *arguments])
    script.main()


@pytest.mark.parametrize("name", ["eagle3", "eagle1", "medusa", "dflash"])
def test_each_method_learns_goes_on_and_is_written_as_published(
    scripts: dict[str, ModuleType],
    text: Path,
    target: LlamaForCausalLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    out = tmp_path / name
    options = {"out": out, "rows": 4, "vocab_size": KNOWN, "lr": 0.01, "text": text}
    ticks = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: float(next(ticks)))  # a step takes a second
    for script in ("train_drafter", "progress"):
        monkeypatch.setattr(scripts[script], "time", clock)
    call(scripts["train_drafter"], monkeypatch, name, minutes=0.05, **options)
    first = json.loads((out / "training.json").read_text())
    call(scripts["train_drafter"], monkeypatch, name, minutes=0.1, **options)
    report = json.loads((out / "training.json").read_text())
    assert report["rows"] == 16
    assert report["curve"][: len(first["curve"])] == first["curve"]
    assert [first["curve"][-1]["step"], report["curve"][-1]["step"]] == [3, 6]
    assert all(len(point["greedy"]) == scripts["train_drafter"].MEASURED_STEPS[name] for point in report["curve"])

    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    head = target.lm_head.weight
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    if name == "medusa":
        assert shapes["3.0.linear.weight"] == (HIDDEN, HIDDEN)
        assert torch.equal(tensors["3.1.weight"], head)
        return
    assert (config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]) == (HIDDEN, 4, 4)
    if name == "eagle3":
        output_ids = torch.arange(KNOWN) + tensors["d2t"]
        assert torch.equal(tensors["t2d"].nonzero().squeeze(1), output_ids)
        assert torch.equal(tensors["lm_head.weight"], head[output_ids])
    if name == "dflash":
        assert config["dflash_config"] == {"mask_token_id": 16, "target_layer_ids": [1, 3, 4]}
