"""The scripts that make the embedded draft: their arithmetic, and the whole way from nothing to a file that loads."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from amusd.drafters.ngram import SHARES
from amusd.models.embedded_draft import load_embedded_draft, read_draft
from amusd.models.load_options import LoadOptions
from amusd.models.numerics import Numerics

FOLDER = Path(__file__).parents[2] / "experiments" / "embedded_draft"
MODULES = ("dataset", "losses", "teacher", "student", "generate", "label", "train", "package", "evaluate")


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path.remove(str(FOLDER))
        for name in MODULES:
            sys.modules.pop(name, None)


def test_the_loss_and_its_gradient_are_those_of_the_formula(scripts: dict[str, ModuleType]) -> None:
    generator = torch.Generator().manual_seed(0)
    states, teacher = (torch.randn(700, 16, dtype=torch.float64, generator=generator) for _ in range(2))
    head = torch.randn(30, 16, dtype=torch.float64, generator=generator)
    columns = torch.stack([torch.randperm(30, generator=generator)[:3] for _ in range(700)])
    columns[torch.rand(700, 3, generator=generator) < 0.2] = -1  # nothing, or what the draft cannot propose
    shares = torch.rand(700, 3, generator=generator) * torch.tensor([0.5, 0.3, 0.15])
    shares[::7] = 0
    states.requires_grad_(requires_grad=True)
    p, q = (teacher @ head.t()).softmax(-1), (states @ head.t()).softmax(-1)
    mixed = q * (1 - shares.sum(-1, keepdim=True))
    mixed = mixed.scatter_add(1, columns.clamp_min(0), shares.double() * (columns >= 0))
    expected = (p * (p.log() - mixed.log())).sum()
    loss = scripts["losses"].divergence(states, teacher, head, columns, shares)
    (wanted,) = torch.autograd.grad(expected, states)
    (gradient,) = torch.autograd.grad(loss, states)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradient.double(), wanted, rtol=1e-3, atol=1e-4)


def test_agreement_is_the_mixtures(scripts: dict[str, ModuleType]) -> None:
    """What neither the draft nor the cache can propose is wrong; what the cache gives counts."""
    head = torch.eye(4)
    teacher = torch.tensor([[0.0, 9, 0, 0], [0, 0, 0, 9], [0, 0, 0, 9]])
    states = torch.tensor([[0.0, 9, 0, 0], [0, 9, 0, 0], [0, 9, 0, 0]])
    known_ids, shares = torch.tensor([[0, 0], [0, 0], [3, 2]]), torch.tensor([[0.0, 0], [0, 0], [0.6, 0.1]])
    greedy, sampled = scripts["losses"].agreement(states, teacher, head, torch.tensor([1, 2]), known_ids, shares)
    assert greedy.tolist() == [True, False, True]
    assert sampled.tolist() == pytest.approx([1.0, 0.0, 0.6], abs=0.01)


def test_what_is_known_stands_behind_the_token_it_follows(scripts: dict[str, ModuleType]) -> None:
    dataset = scripts["dataset"]
    token_ids = np.array([[5, 6, 5, 0, 0], [6, 7, 8, 6, 7]])
    text = dataset.Text(token_ids, np.array([3, 5]), np.ones((2, 5), bool), np.zeros(2, np.float32), 1)
    known = dataset.known_tokens(text)
    assert known.token_ids[:, 0].tolist() == [0, 0, 6, 0, 0, 0, 7, 8]  # rows know nothing of each other
    assert known.shares[:, 0].tolist() == pytest.approx([0, 0, SHARES[1], 0, 0, 0, SHARES[1], SHARES[2]])
    assert not known.shares[:, 1:].any()


def test_texts_come_back_and_batches_hold_every_row_once(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    dataset = scripts["dataset"]
    random = np.random.default_rng(0)
    length = random.integers(3, 20, 50)
    answer = random.random((50, 20)) < 0.5
    text = dataset.Text(random.integers(0, 49152, (50, 20)), length, answer, np.full(50, 0.6, np.float32), 2)
    dataset.write_text(tmp_path / "text.npz", text)
    read = dataset.read_text(tmp_path / "text.npz")
    assert np.array_equal(read.token_ids, text.token_ids)
    assert np.array_equal(read.answer, answer)
    assert read.num_tokens == length.sum()
    batches = list(dataset.batches_by_length(read, tokens_per_batch=40))
    assert sorted(np.concatenate(batches)) == list(range(50))
    assert all(length[rows].max() * len(rows) <= 40 for rows in batches)


def test_each_time_round_holds_every_row_once_and_an_interrupted_run_goes_on_with_the_same_batches(
    scripts: dict[str, ModuleType],
) -> None:
    batches = scripts["train"].batches
    length = np.array([30] * 20 + [50] * 7)
    pool = np.arange(27)
    whole = list(batches(pool, length, 4, 21, 5, 0))
    assert len(whole) == 21
    for time_round in (whole[:7], whole[7:14], whole[14:]):
        assert sorted(np.concatenate(time_round)) == list(range(27))
        assert sum(len(set(length[rows])) > 1 for rows in time_round) <= 1  # padding is rare
    rest = list(batches(pool, length, 4, 21, 5, 9))
    assert all(np.array_equal(a, b) for a, b in zip(whole[9:], rest, strict=True))


def test_the_vocabulary_is_what_answers_hold_most_and_what_ends_them(scripts: dict[str, ModuleType]) -> None:
    text = scripts["dataset"].Text(
        np.array([[5, 6, 6, 7, 7, 7]]),
        np.array([6]),
        np.array([[False, True, True, True, True, True]]),
        np.zeros(1, np.float32),
        0,
    )
    assert scripts["train"].most_frequent(text, 4, 10, {9}).tolist() == [9, 7, 6, 0]


def test_loops_are_told_from_prose(scripts: dict[str, ModuleType]) -> None:
    repeated_share = scripts["dataset"].repeated_share
    assert repeated_share(list(range(100))) == 0
    assert repeated_share([1, 2, 3, 4] * 25) > 0.9
    assert repeated_share([1, 2]) == 0


@pytest.mark.embedded
@pytest.mark.timeout(300)
def test_from_nothing_to_a_draft_that_loads(
    scripts: dict[str, ModuleType], embedded_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, states, draft, shipped = (tmp_path / name for name in ("text.npz", "states", "draft", "draft.safetensors"))

    def call(name: str, **options: object) -> None:
        arguments = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        scripts[name].main()

    monkeypatch.setattr(scripts["train"], "HELD_OUT_ROWS", 2)
    monkeypatch.setattr(scripts["generate"], "MOST_USER_TOKENS", 30)  # with more of them there is no room for an answer
    call("generate", out=text, tokens=150, length=60, rows=6)
    call("label", text=text, out=states, tokens_per_batch=256)
    call("train", text=text, states=states, out=draft, layers="0,r", vocab_size=64, epochs=12, rows=2, lr=0.0005)
    call("package", draft=draft, out=shipped)
    first = (draft / "weights.safetensors").read_bytes()

    rows = scripts["dataset"].read_text(text)
    assert rows.num_tokens >= 150
    prefix = rows.token_ids[0, : rows.prefix_length]
    assert (rows.token_ids[:, : rows.prefix_length] == prefix).all()
    assert rows.answer.any(axis=1).all()
    report = json.loads((draft / "training.json").read_text())
    assert report["curve"][-1]["loss"] < report["curve"][1]["loss"]  # the first is from before the first step
    assert read_draft(shipped).num_layers == 2
    assert read_draft(shipped).facts["before"] is None

    # cut off and run again, or run again with more epochs: the weights are those of one run
    class CutOffError(Exception):
        """As if the machine had gone."""

    learn = scripts["train"].Run.learn

    def learn_or_end(run: Any, rows: np.ndarray) -> None:
        if run.step == run.plateau_end + 3:
            raise CutOffError
        learn(run, rows)

    same = {"text": text, "states": states, "layers": "0,r", "vocab_size": 64, "rows": 2, "lr": 0.0005}
    call("train", out=tmp_path / "whole", epochs=16, **same)
    with monkeypatch.context() as patch:
        patch.setattr(scripts["train"], "CHECKPOINT_SECONDS", 0)
        patch.setattr(scripts["train"].Run, "learn", learn_or_end)
        with pytest.raises(CutOffError):
            call("train", out=draft, epochs=12, **same)
    call("train", out=draft, epochs=12, **same)
    assert (draft / "weights.safetensors").read_bytes() == first
    call("train", out=draft, epochs=16, **same)
    assert (draft / "weights.safetensors").read_bytes() == (tmp_path / "whole" / "weights.safetensors").read_bytes()

    further = {"text": text, "states": states, "layers": "0,r,1", "epochs": 6, "rows": 2, "lr": 0.0005}
    call("train", out=tmp_path / "further", draft_file=shipped, **further)
    call("package", draft=tmp_path / "further", out=tmp_path / "further.safetensors")
    continued = read_draft(tmp_path / "further.safetensors")
    assert continued.num_layers == 3
    assert continued.facts["before"] == read_draft(shipped).facts
    assert continued.output_ids.tolist() == read_draft(shipped).output_ids.tolist()
    curve = json.loads((tmp_path / "further" / "training.json").read_text())["curve"]
    assert curve[0]["greedy"] == report["curve"][-1]["greedy"]  # a third layer that changes nothing yet
    assert curve[-1]["loss"] < report["curve"][-1]["loss"]
    model = load_embedded_draft(
        embedded_folder,
        LoadOptions(numerics=Numerics(width=16, fixed=False), max_model_len=64),
        vocab_size=64,
        draft_file=shipped,
    )
    assert torch.isfinite(model.forward([1, 2, 3], model.new_cache(8)).logits).all()
