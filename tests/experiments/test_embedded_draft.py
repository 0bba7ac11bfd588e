"""The scripts that make the embedded draft: their arithmetic, and the whole way from nothing to a file that loads."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from models import tiny

from amusd.drafters.ngram import WEIGHTS
from amusd.models.embedded_draft import load_embedded_draft, read_draft
from amusd.models.load_options import LoadOptions
from amusd.models.numerics import Numerics
from amusd.sampling.ranking import UNPROPOSED

FOLDER = Path(__file__).parents[2] / "experiments" / "embedded_draft"
MODULES = ("dataset", "losses", "teacher", "student", "label", "train", "package", "evaluate")


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
    head = torch.randn(30, 16, dtype=torch.float64, generator=generator) / 3
    columns = torch.stack([torch.randperm(30, generator=generator)[:3] for _ in range(700)])
    columns[torch.rand(700, 3, generator=generator) < 0.2] = -1  # what the draft cannot propose
    biases = 3 * torch.rand(700, 3, generator=generator) - 1
    biases[::7] = -torch.inf  # nothing is known
    biases[::5, 1:], columns[::5, 1:] = -torch.inf, columns[::5, :1]  # nor twice more, in the column of what is
    slopes = 0.2 + torch.rand(700, 3, generator=generator)
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


def test_a_token_of_which_nothing_is_accepted_leaves_the_loss_and_its_gradient_finite(
    scripts: dict[str, ModuleType],
) -> None:
    head = torch.eye(3)
    teacher, states = 200 * head[:1], (200 * head[1:2]).requires_grad_()  # p and q share no token in float32
    nothing = torch.tensor([[-1]]), torch.tensor([[-torch.inf]]), torch.tensor([[1.0]])
    loss = scripts["losses"].negative_log_acceptance(states, teacher, head, *nothing)
    (gradient,) = torch.autograd.grad(loss, states)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()


def test_agreement_is_the_mixtures(scripts: dict[str, ModuleType]) -> None:
    """What neither the draft nor the cache can propose is wrong; what the cache gives counts."""
    head = torch.eye(4)
    teacher = torch.tensor([[0.0, 9, 0, 0], [0, 0, 0, 9], [0, 0, 0, 9]])
    states = torch.tensor([[0.0, 9, 0, 0], [0, 9, 0, 0], [0, 9, 0, 0]])
    known_ids = torch.tensor([[0, 0], [0, 0], [3, 2]])
    biases = torch.full((3, 2), -torch.inf)
    biases[2] = torch.tensor([3.0, 0.0])
    slopes = torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.3, 0.3]])
    parts = scripts["losses"].agreement(states, teacher, head, torch.tensor([1, 2]), known_ids, biases, slopes)
    assert parts[0].tolist() == [True, False, True]
    known, other = math.exp(3 + 0.3 * UNPROPOSED), math.exp(0.3 * -9)  # q of the other known token is exp(-9)
    assert parts[1].tolist() == pytest.approx([1.0, 0.0, known / (known + other + 1)], abs=0.01)


def test_what_is_known_stands_behind_the_token_it_follows(scripts: dict[str, ModuleType]) -> None:
    dataset = scripts["dataset"]
    token_ids = np.array([[5, 6, 5, 0, 0], [6, 7, 8, 6, 7]])
    text = dataset.Text(token_ids, np.array([3, 5]), np.ones((2, 5), bool), np.zeros(2, np.float32), 1)
    known = dataset.known_tokens(text)
    assert known.token_ids[:, 0].tolist() == [0, 0, 6, 0, 0, 0, 7, 8]  # rows know nothing of each other
    assert known.agreeing[:, 0].tolist() == [0, 0, 1, 0, 0, 0, 1, 2]
    assert not known.agreeing[:, 1:].any()
    ids, biases, slopes = known.at(np.array([6, 7, 3]))
    assert ids[:, 0].tolist() == [7, 8, 0]
    said = zip(biases[:, 0].tolist(), slopes[:, 0].tolist(), strict=True)
    assert list(said) == [pytest.approx(each) for each in (*WEIGHTS[:2], (-math.inf, 1.0))]
    assert (biases[:, 1:] == -math.inf).all()


def test_texts_come_back_and_batches_hold_every_row_once(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    dataset = scripts["dataset"]
    numbers = np.random.default_rng(0)
    length = numbers.integers(3, 20, 50)
    answer = numbers.random((50, 20)) < 0.5
    text = dataset.Text(numbers.integers(0, 49152, (50, 20)), length, answer, np.full(50, 0.6, np.float32), 2)
    dataset.write_text(tmp_path / "text.npz", text)
    read = dataset.read_text(tmp_path / "text.npz")
    assert np.array_equal(read.token_ids, text.token_ids)
    assert np.array_equal(read.answer, answer)
    assert read.num_tokens == length.sum()
    batches = list(dataset.batches_by_length(read, tokens_per_batch=40))
    assert sorted(np.concatenate(batches)) == list(range(50))
    assert all(length[rows].max() * len(rows) <= 40 for rows in batches)


def test_what_is_held_out_stays_so_when_corpora_are_added(scripts: dict[str, ModuleType]) -> None:
    held_out, others = scripts["train"].split([200, 10])
    assert sorted([*held_out, *others]) == list(range(210))
    assert len(held_out) == 4
    with_more, rest = scripts["train"].split([200, 10, 50])
    assert sorted(with_more)[:4] == sorted(held_out)
    assert sorted([*with_more, *rest]) == list(range(260))
    behind, _ = scripts["train"].split([10, 200])
    assert sorted(row - 10 for row in behind if row >= 10) == sorted(row for row in held_out if row < 200)


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


def test_the_vocabulary_is_what_must_be_in_it_and_what_answers_hold_most(scripts: dict[str, ModuleType]) -> None:
    text = scripts["dataset"].Text(
        np.array([[5, 6, 6, 7, 7, 7]]),
        np.array([6]),
        np.array([[False, True, True, True, True, True]]),
        np.zeros(1, np.float32),
        0,
    )
    most_frequent = scripts["train"].most_frequent
    assert most_frequent(text, 4, 10, [9]).tolist() == [9, 7, 6, 0]
    assert most_frequent(text, 5, 10, [8, 6, 1]).tolist() == [8, 6, 1, 7, 0]
    assert sorted(most_frequent(text, 99, 10, [8, 6, 1])) == list(range(10))


def test_loops_are_told_from_prose(scripts: dict[str, ModuleType]) -> None:
    loops = scripts["dataset"].loops
    assert not loops(list(range(100)))
    assert loops([1, 2, 3, 4] * 25)
    assert not loops([1, 2])
    assert not loops([*range(88), *range(12)])  # one window of 89 has occurred before


def test_a_tree_holds_a_token_only_behind_a_path_that_it_holds(scripts: dict[str, ModuleType]) -> None:
    evaluate = scripts["evaluate"]
    greedy, sampled = [[0, 0, 3, 0], [1, 0]], [[0, 0]]
    judged = [
        evaluate.Judged("", temperature, position, False, 0.0, 0.0, 0.0, rank, False)
        for temperature, answers in ((0.0, greedy), (1.0, sampled))
        for ranks in answers
        for position, rank in enumerate(ranks)
    ]
    table = evaluate.by_depth(judged)
    assert evaluate.WIDTHS == (1, 2, 4, 8)
    assert table[1] == [4 / 6, 5 / 6, 1.0, 1.0]
    assert table[2] == [1 / 2, 2 / 3, 1.0, 1.0]  # in pairs whose first token is held: 00, 03; with two guesses also 10
    assert table[3] == [0.0, 0.0, 1.0, 1.0]
    assert table[5] == [None] * 4


class Workshop:
    """A tiny target, and a folder in which the scripts have made a draft of one layer for it."""

    def __init__(self, scripts: dict[str, ModuleType], folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._scripts, self._patch, self.folder = scripts, patch, folder
        self.corpora, self.target = folder / "corpora", folder / "target"
        patch.setattr(scripts["train"], "HELD_OUT_SHARE", 0.1)
        patch.setattr(scripts["label"], "TOKENS_PER_BATCH", 200)
        tiny.save_checkpoint(self.target, tiny.tiny_config(), tiny.byte_tokenizer())
        self.teacher = tiny.tiny_causal_lm(tiny.tiny_config()).requires_grad_(requires_grad=False)
        for name in ("label", "train"):
            patch.setattr(scripts[name], "load_teacher", lambda device: self.teacher)
        random = np.random.default_rng(0)
        length = random.integers(20, 40, 20)
        columns = np.arange(40)
        answer = (columns >= 8) & (columns < length[:, None])
        self.text = scripts["dataset"].Text(
            random.integers(3, 97, (20, 40)), length, answer, np.ones(20, np.float32), 4
        )
        for name, rows in (("a", np.arange(12)), ("b", np.arange(12, 20))):
            scripts["dataset"].write_text(folder / f"{name}.npz", self.text.select(rows))
            self.call("label", text=folder / f"{name}.npz", out=self.corpora)
        (self.corpora / "c.partial").mkdir()  # one that is being written
        self.first = self.train("draft", vocab_size=64)
        self.shipped = self.package(self.first)

    def call(self, name: str, **options: object) -> None:
        """Run a script by its command line."""
        arguments = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
        self._patch.setattr(sys, "argv", [name, *arguments])
        self._scripts[name].main()

    def train(self, name: str, **options: object) -> Path:
        """The folder of a run."""
        options = {"layers": 0, "rows": 6, "lr": 0.01, "epochs": 4, **options}
        self.call("train", corpus=self.corpora, out=self.folder / name, **options)
        return self.folder / name

    def package(self, draft: Path, **options: object) -> Path:
        self.call("package", draft=draft, out=draft.with_suffix(".safetensors"), **options)
        return draft.with_suffix(".safetensors")


@pytest.fixture(scope="module")
def workshop(scripts: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    with pytest.MonkeyPatch.context() as patch:
        yield Workshop(scripts, tmp_path_factory.mktemp("workshop"), patch)


def test_states_are_those_of_reading_each_row_alone_and_a_corpus_is_made_once(
    workshop: Workshop, scripts: dict[str, ModuleType]
) -> None:
    texts, states = scripts["dataset"].read_corpora(workshop.corpora)
    assert np.array_equal(scripts["dataset"].join(texts).token_ids, workshop.text.token_ids)
    for row, length in enumerate(workshop.text.length):
        token_ids = torch.from_numpy(workshop.text.token_ids[row : row + 1, :length])
        with torch.no_grad():
            alone = workshop.teacher.base_model(input_ids=token_ids).last_hidden_state[0]
        torch.testing.assert_close(states[row].float(), alone, rtol=0.02, atol=0.02)  # bfloat16
    labelled_at = (workshop.corpora / "a" / "states.npy").stat().st_mtime_ns
    workshop.call("label", text=workshop.folder / "a.npz", out=workshop.corpora)
    assert (workshop.corpora / "a" / "states.npy").stat().st_mtime_ns == labelled_at


def test_a_draft_is_made_from_nothing_and_loads(workshop: Workshop) -> None:
    curve = json.loads((workshop.first / "training.json").read_text())["curve"]
    assert curve[-1]["loss"] < curve[1]["loss"]  # the first is from before the first step
    draft = read_draft(workshop.shipped)
    assert (draft.num_layers, draft.facts["before"]) == (1, None)
    options = LoadOptions(numerics=Numerics(width=16, fixed=False), max_model_len=64)
    model = load_embedded_draft(workshop.target, options, vocab_size=64, draft_file=workshop.shipped)
    assert torch.isfinite(model.forward([1, 2, 3], model.new_cache(8)).logits).all()


def test_a_training_cut_off_ends_with_the_weights_of_one_run(
    workshop: Workshop, scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    class CutOffError(Exception):
        """As if the machine had gone."""

    learn = scripts["train"].Run.learn

    def learn_or_end(run: Any, rows: np.ndarray) -> None:
        if run.step == 7:
            raise CutOffError
        learn(run, rows)

    with monkeypatch.context() as patch:
        patch.setattr(scripts["train"], "CHECKPOINT_SECONDS", 0)
        patch.setattr(scripts["train"].Run, "learn", learn_or_end)
        with pytest.raises(CutOffError):
            workshop.train("cut off", vocab_size=64)
    cut_off = workshop.train("cut off", vocab_size=64)
    assert (cut_off / "weights.safetensors").read_bytes() == (workshop.first / "weights.safetensors").read_bytes()


def test_a_draft_goes_on_over_fewer_tokens_and_is_averaged_with_the_one_before(
    workshop: Workshop, scripts: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    further = workshop.train("further", draft_file=workshop.shipped, vocab_size=32)
    before, after = read_draft(workshop.shipped), read_draft(workshop.package(further))
    assert after.facts["before"] == before.facts
    assert sorted(after.output_ids.tolist()) == sorted(before.output_ids.tolist())
    mean = read_draft(workshop.package(further, mean_with=workshop.shipped))
    for name, tensor in mean.tensors.items():
        wanted = (before.tensors[name] + after.tensors[name]) / 2
        assert (tensor - wanted).norm() < 0.02 * wanted.norm()  # rounded to eight bits
    with pytest.raises(SystemExit):
        workshop.package(further, mean_with=further.with_suffix(".safetensors"))
    assert "not the draft that" in capsys.readouterr().err


def test_a_draft_is_judged_by_every_token_of_the_answers(
    workshop: Workshop, scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts["evaluate"], "MAX_LENGTH", 256)
    monkeypatch.setattr(scripts["evaluate"], "embedded_target_path", lambda: workshop.target)
    answers, report = tmp_path / "answers.json", tmp_path / "report.json"
    prompt, tokens = [1, 90, 19], read_draft(workshop.shipped).output_ids[:16].tolist()
    records = [
        {"category": name, "temperature": temperature, "prompt": prompt, "tokens": tokens * times}
        for name, temperature, times in (("a", 0.0, 1), ("b x", 0.0, 4), ("b y", 1.0, 1))
    ]
    answers.write_text(json.dumps(records))
    workshop.call("evaluate", answers=answers, draft_file=workshop.shipped, vocab_size=64, out=report)
    tables = json.loads(report.read_text())
    of_all = tables["all"][""]
    assert of_all["num_tokens"] == 96
    assert {name: row["num_tokens"] for name, row in tables["by set"].items()} == {"a": 16, "b": 80}
    assert tables["by depth"]["1"][0] == of_all["greedy_mixture"]
    assert tables["by depth"]["1"] == sorted(tables["by depth"]["1"])
    assert of_all["greedy_mixture"] > of_all["greedy"]  # the second answer says the same four times
    assert 0 < of_all["sampled"] < 1


def test_greedy_answers_are_the_likeliest_tokens_and_sampled_ones_follow_their_seed(
    workshop: Workshop, scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts["evaluate"], "MAX_NEW_TOKENS", 6)
    answer = scripts["evaluate"].answer_one
    greedy = answer(workshop.teacher, [5, 6, 7], 0.0, 1)
    logits = workshop.teacher(input_ids=torch.tensor([[5, 6, 7, *greedy]])).logits[0]
    assert greedy == logits[2:-1].argmax(-1).tolist()
    sampled = [answer(workshop.teacher, [5, 6, 7], 1.0, seed) for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


@pytest.mark.long
def test_the_loss_can_be_compiled(scripts: dict[str, ModuleType]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 40, 30, generator=generator)
    columns = torch.randint(-1, 30, (40, 1), generator=generator)
    operands = (*logits, columns, torch.rand(40, 1, generator=generator), torch.rand(40, 1, generator=generator))
    compiled = torch.compile(scripts["losses"].loss_of_block, backend="aot_eager")  # needs no C++ compiler
    torch.testing.assert_close(compiled(*operands), scripts["losses"].loss_of_block(*operands))
