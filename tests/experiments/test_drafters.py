"""The script that trains drafters of each published method, on a tiny target."""

from __future__ import annotations

import itertools
import json
import types
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from models import tiny
from safetensors.torch import load_file

from tests.experiments.conftest import Call

KNOWN = 24


@pytest.mark.parametrize("name", ["eagle3", "eagle1", "medusa", "dflash"])
def test_each_method_learns_goes_on_and_is_written_as_published(
    scripts: dict[str, ModuleType], call: Call, text: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    target = tiny.tiny_causal_lm(tiny.tiny_config(num_hidden_layers=8)).requires_grad_(False).bfloat16()
    scripts["dataset"].write_text(tmp_path / "text.npz", text)
    monkeypatch.setattr(scripts["train_drafter"], "load_teacher", lambda device: target)
    monkeypatch.setattr(scripts["train_drafter"], "HELD_OUT_ROWS", 4)
    ticks = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: float(next(ticks)))  # a step takes a second
    for script in ("train_drafter", "progress"):
        monkeypatch.setattr(scripts[script], "time", clock)
    out = tmp_path / name
    options = {"out": out, "rows": 4, "vocab_size": KNOWN, "lr": 0.01, "text": tmp_path / "text.npz"}
    call("train_drafter", name, minutes=0.05, **options)
    first = json.loads((out / "training.json").read_text())
    call("train_drafter", name, minutes=0.1, **options)
    report = json.loads((out / "training.json").read_text())
    assert report["rows"] == 16
    assert report["curve"][: len(first["curve"])] == first["curve"]
    assert [first["curve"][-1]["step"], report["curve"][-1]["step"]] == [3, 6]
    assert all(len(point["greedy"]) == scripts["train_drafter"].MEASURED_STEPS[name] for point in report["curve"])

    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    head, hidden = target.lm_head.weight, target.config.hidden_size
    if name == "medusa":
        assert tensors["3.0.linear.weight"].shape == (hidden, hidden)
        assert torch.equal(tensors["3.1.weight"], head)
        return
    assert (config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]) == (hidden, 4, 4)
    if name == "eagle3":
        output_ids = torch.arange(KNOWN) + tensors["d2t"]
        assert torch.equal(tensors["t2d"].nonzero().squeeze(1), output_ids)
        assert torch.equal(tensors["lm_head.weight"], head[output_ids])
    if name == "dflash":
        assert config["dflash_config"] == {"mask_token_id": 16, "target_layer_ids": [1, 3, 4]}
