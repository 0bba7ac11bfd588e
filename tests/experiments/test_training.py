"""The scripts that train drafts: their arithmetic, and the whole way from nothing to a file that loads."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from models import tiny
from passes import forward
from safetensors.torch import load_file

from amusd.checkpoints.embedded_draft import load_embedded_draft, read_draft
from amusd.models.numerics import Numerics
from amusd.runner.load_options import LoadOptions
from amusd.sampling.ranking import UNPROPOSED

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
MODULES = ("dataset", "losses", "progress", "student", "teacher", "label", "train", "package", "evaluate")
MODULES += ("layouts", "networks", "train_drafter")
Call = Callable[..., None]


@pytest.fixture(scope="package")
def scripts() -> Iterator[dict[str, ModuleType]]:
    before = list(sys.path)
    sys.path[:0] = [str(EXPERIMENTS / "drafters"), str(EXPERIMENTS / "embedded_draft")]
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path[:] = before
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture
def call(scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs the script of this name as the command with these arguments and options."""

    def run(name: str, *arguments: str, **options: object) -> None:
        given = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
        monkeypatch.setattr(sys, "argv", [name, *arguments, *given])
        scripts[name].main()

    return run


@pytest.fixture
def text(scripts: dict[str, ModuleType]) -> Any:
    """Twenty random rows of up to 40 tokens, the first ten of each a prompt."""
    random = np.random.default_rng(0)
    length, columns = random.integers(24, 40, 20), np.arange(40)
    answer = (columns >= 10) & (columns < length[:, None])
    return scripts["dataset"].Text(random.integers(17, 97, (20, 40)), length, answer, np.ones(20, np.float32), 4)


def test_the_loss_and_its_gradient_are_those_of_the_formula(scripts: dict[str, ModuleType]) -> None:
    generator = torch.Generator().manual_seed(0)
    states, teacher = (torch.randn(520, 16, dtype=torch.float64, generator=generator) for _ in range(2))
    head = torch.randn(30, 16, dtype=torch.float64, generator=generator) / 3
    columns = torch.stack([torch.randperm(30, generator=generator)[:3] for _ in range(520)])
    columns[torch.rand(520, 3, generator=generator) < 0.2] = -1  # what the draft cannot propose
    biases = 3 * torch.rand(520, 3, generator=generator) - 1
    biases[::7] = -torch.inf  # nothing is known
    biases[::5, 1:], columns[::5, 1:] = -torch.inf, columns[::5, :1]  # nor twice more, in the column of what is
    slopes = 0.2 + torch.rand(520, 3, generator=generator)
    states.requires_grad_(requires_grad=True)
    p, q = (teacher @ head.t()).softmax(-1), (states @ head.t()).softmax(-1)
    rows = []
    for place, row in enumerate(q):
        weights, others = list(row), 0.0
        for column, bias, slope in zip(columns[place].tolist(), biases[place], slopes[place], strict=True):
            if column >= 0 and bias > -torch.inf:
                weights[column] = torch.maximum(row[column], bias.exp() * row[column] ** slope)
            else:
                others += float(bias.exp() * math.exp(UNPROPOSED) ** slope)
        rows.append(torch.stack(weights) / (sum(weights) + others))
    expected = -torch.minimum(p, torch.stack(rows)).sum(-1).log().sum()
    loss = scripts["losses"].negative_log_acceptance(states, teacher, head, columns, biases, slopes)
    (wanted,) = torch.autograd.grad(expected, states)
    (gradient,) = torch.autograd.grad(loss, states)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradient.double(), wanted, rtol=1e-3, atol=1e-4)


def test_a_draft_is_made_from_nothing_and_loads(
    scripts: dict[str, ModuleType], call: Call, text: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts["train"], "HELD_OUT_SHARE", 0.1)
    monkeypatch.setattr(scripts["label"], "TOKENS_PER_BATCH", 200)
    tiny.save_checkpoint(tmp_path / "target", tiny.tiny_config(), tiny.byte_tokenizer())
    teacher = tiny.tiny_causal_lm(tiny.tiny_config()).requires_grad_(requires_grad=False)
    for name in ("label", "train"):
        monkeypatch.setattr(scripts[name], "load_teacher", lambda device: teacher)
    corpora, first, shipped = tmp_path / "corpora", tmp_path / "draft", tmp_path / "draft.safetensors"
    for name, rows in (("a", np.arange(12)), ("b", np.arange(12, 20))):
        scripts["dataset"].write_text(tmp_path / f"{name}.npz", text.select(rows))
        call("label", text=tmp_path / f"{name}.npz", out=corpora)
    call("train", corpus=corpora, out=first, layers=0, rows=6, lr=0.01, epochs=4, vocab_size=64)
    call("package", draft=first, out=shipped)
    curve = json.loads((first / "training.json").read_text())["curve"]
    assert curve[-1]["loss"] < curve[1]["loss"]  # the first is from before the first step
    draft = read_draft(shipped)
    assert (draft.num_layers, draft.facts["before"]) == (1, None)
    options = LoadOptions(numerics=Numerics(width=16, fixed=False), max_model_len=64)
    model = load_embedded_draft(tmp_path / "target", options, vocab_size=64, draft_file=shipped)
    assert torch.isfinite(forward(model, [1, 2, 3], model.new_cache(8)).logits).all()


# Drafters of each published method, on a tiny target


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
