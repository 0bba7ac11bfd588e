"""The scripts that make the embedded draft: their arithmetic, and the whole way from nothing to a file that loads."""

from __future__ import annotations

import dataclasses
import fcntl
import importlib
import json
import math
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from amusd.drafters.ngram import WEIGHTS
from amusd.models.embedded_draft import DraftWeights, load_embedded_draft, read_draft, write_draft
from amusd.models.load_options import LoadOptions
from amusd.models.numerics import Numerics
from amusd.sampling.ranking import UNPROPOSED

FOLDER = Path(__file__).parents[2] / "experiments" / "embedded_draft"
MODULES = (
    "dataset",
    "losses",
    "teacher",
    "student",
    "writer",
    "openings",
    "generate",
    "label",
    "train",
    "package",
    "evaluate",
    "mixture",
)


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path.remove(str(FOLDER))
        for name in MODULES:
            sys.modules.pop(name, None)


def tiny_llama() -> LlamaForCausalLM:
    """Random weights; heads in groups, as the target's."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        pad_token_id=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(requires_grad=False)


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


def some_places(mixture: ModuleType, num_tokens: int) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor, Any]:
    """Random tokens, and what they were made of: log q and p over 300 ids, what is known, how many tokens agree."""
    generator = torch.Generator().manual_seed(3)
    log_q, p = (2 * torch.randn(num_tokens, 300, generator=generator) for _ in range(2))
    log_q[:, ::8] = -torch.inf  # cannot be proposed
    log_q, p = log_q.log_softmax(-1), p.softmax(-1)
    known = torch.stack([torch.randperm(300, generator=generator)[:3] for _ in range(num_tokens)])
    agreeing = torch.randint(0, len(WEIGHTS) + 1, known.shape, generator=generator)
    return mixture.places_of(known, agreeing, log_q.clone(), p), log_q, p, known, agreeing


@pytest.mark.parametrize("kept", [20, 250])
def test_what_mixing_is_worth_is_what_the_mixture_accepts(
    scripts: dict[str, ModuleType], kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts["mixture"], "KEPT", kept)
    places, log_q, p, known, agreeing = some_places(scripts["mixture"], 300)
    proposed = torch.arange(300)[log_q[0].isfinite()]
    for weights in (None, scripts["mixture"].Weights.shipped()):
        biases, slopes = torch.tensor([(-math.inf, 1.0), *WEIGHTS])[agreeing].unbind(-1)
        if weights is None:
            biases = torch.full_like(biases, -math.inf)
        mixed = scripts["losses"].mix(log_q[:, proposed].exp(), proposed, known, biases, slopes, 300)
        ranks = (mixed > mixed.gather(1, p.argmax(-1, keepdim=True))).sum(-1)
        expected = [float((ranks < depth).float().mean()) for depth in scripts["mixture"].DEPTHS]
        *shares, sampled = scripts["mixture"].judge(places, weights)
        assert shares == pytest.approx(expected, abs=1e-5)
        likeliest = scripts["mixture"].mix(places, weights).topk(9).values
        torch.testing.assert_close(likeliest, mixed.topk(9).values, rtol=1e-4, atol=1e-6)
        everything = float(torch.minimum(p, mixed).sum(-1).mean())
        assert everything - (0.4 if kept == 20 else 0.02) < sampled <= everything + 1e-5


def test_the_weights_that_a_target_follows_are_found(scripts: dict[str, ModuleType]) -> None:
    mixture = scripts["mixture"]
    places, *_ = some_places(mixture, 2000)
    slopes = torch.tensor([0.7, *[0.4] * (len(WEIGHTS) - 2), 0.25])
    followed = mixture.Weights(torch.linspace(0.0, 2.0, len(WEIGHTS)), slopes, torch.tensor(-2.0))
    places = dataclasses.replace(places, p=mixture.mix(places, followed))
    fitted = mixture.fit(places, mixture.Weights.shipped())
    assert mixture.judge(places, mixture.Weights.shipped())[-1] < 0.9
    assert mixture.judge(places, fitted)[-1] > 0.99
    torch.testing.assert_close(fitted.biases, followed.biases, rtol=0, atol=0.2)
    torch.testing.assert_close(fitted.slopes, followed.slopes, rtol=0, atol=0.05)
    assert float(fitted.unproposed) == pytest.approx(-2.0, abs=0.3)


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


def test_corpora_are_read_as_one_and_a_folder_without_any_is_refused(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    dataset = scripts["dataset"]
    states = np.arange(7 * 4, dtype=np.uint16).reshape(7, 4)
    for name, token_ids, length in (("b", [[5, 6, 7, 8]], [4]), ("a", [[1, 2, 3], [4, 0, 0]], [2, 1])):
        text = dataset.Text(
            np.array(token_ids), np.array(length), np.array(token_ids) > 2, np.zeros(len(length), np.float32), 1
        )
        begin = {"a": 0, "b": 3}[name]
        dataset.write_corpus(tmp_path / name, text, states[begin : begin + sum(length)])
    (tmp_path / "c.partial").mkdir()  # one that is being written
    dataset.write_text(tmp_path / "c.partial" / "text.npz", text)
    text, (_, rows) = dataset.read_text(tmp_path), dataset.read_corpora(tmp_path)
    assert text.token_ids.tolist() == [[1, 2, 3, 0], [4, 0, 0, 0], [5, 6, 7, 8]]
    assert text.length.tolist() == [2, 1, 4]
    assert text.answer.tolist() == [[False, False, True, False], [True, False, False, False], [True] * 4]
    assert [row.view(torch.uint16).tolist() for row in rows] == [
        states[:2].tolist(),
        states[2:3].tolist(),
        states[3:].tolist(),
    ]
    assert dataset.read_text(tmp_path / "b").length.tolist() == [4]
    (tmp_path / "b" / "nothing").mkdir()
    with pytest.raises(FileNotFoundError, match=r"text\.npz"):
        dataset.read_text(tmp_path / "b" / "nothing")


def test_what_is_held_out_stays_so_when_corpora_are_added(scripts: dict[str, ModuleType]) -> None:
    held_out, others = scripts["train"].split([200, 10])
    assert sorted([*held_out, *others]) == list(range(210))
    assert len(held_out) == 4
    with_more, rest = scripts["train"].split([200, 10, 50])
    assert sorted(with_more)[:4] == sorted(held_out)
    assert sorted([*with_more, *rest]) == list(range(260))
    behind, _ = scripts["train"].split([10, 200])
    assert sorted(row - 10 for row in behind if row >= 10) == sorted(row for row in held_out if row < 200)


def test_rows_of_all_lengths_written_side_by_side_have_the_states_that_the_target_gives_them_alone(
    scripts: dict[str, ModuleType],
) -> None:
    model = tiny_llama()
    writer = scripts["writer"].Writer(model, 3, 12)
    rows = {0: [5, 6, 7, 8, 9], 2: [11, 12]}

    def states_of(token_ids: list[int]) -> torch.Tensor:
        states: torch.Tensor = model.base_model(input_ids=torch.tensor([token_ids])).last_hidden_state[0]
        return states

    for slot, row in rows.items():
        (read,) = writer.read([slot], [0], [row])
        torch.testing.assert_close(read, states_of(row))
    read = writer.read([2, 0], [2, 5], [[13, 14], [15, 16]])  # some slots, several tokens
    for slot, added, of_row in ((2, [13, 14], read[0]), (0, [15, 16], read[1])):
        rows[slot] += added
        torch.testing.assert_close(of_row, states_of(rows[slot])[-2:])
    for token_id in (20, 21):
        starts = [len(rows[0]), 0, len(rows[2])]
        read = writer.read([0, 1, 2], starts, [[token_id], [5], [token_id + 10]])
        rows[0].append(token_id)
        rows[2].append(token_id + 10)
        torch.testing.assert_close(read[0, 0], states_of(rows[0])[-1])
        torch.testing.assert_close(read[1, 0], states_of([5])[-1])
        torch.testing.assert_close(read[2, 0], states_of(rows[2])[-1])
    (read,) = writer.read([0], [0], [[50, 51, 52]])  # a new row in a slot that held a longer one
    torch.testing.assert_close(read, states_of([50, 51, 52]))
    read = writer.read([0, 1, 2], [3, 0, 0], [[60], [5], [5]])
    torch.testing.assert_close(read[0, 0], states_of([50, 51, 52, 60])[-1])


def test_a_greedy_token_is_no_draw_even_where_all_are_as_likely(scripts: dict[str, ModuleType]) -> None:
    model = tiny_llama()
    writer, generator = scripts["writer"].Writer(model, 1, 4), torch.Generator().manual_seed(0)
    states = torch.zeros(64, model.config.hidden_size)
    assert len(set(writer.choose(states, [0.0] * 64, generator))) == 1
    assert len(set(writer.choose(states, [1.0] * 64, generator))) > 10


def test_a_row_is_continued_greedily_until_its_end_or_its_limit(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    rows = [[5, 6, 7, 8], [9, 10]]
    model.generation_config.eos_token_id = 96
    plain = [model.generate(torch.tensor([row]), max_new_tokens=8, do_sample=False)[0].tolist() for row in rows]
    wanted = [row[len(own) :] for row, own in zip(plain, rows, strict=True)]
    continue_rows = scripts["writer"].continue_rows
    assert continue_rows(model, rows, temperature=0.0, max_new_tokens=8) == wanted
    monkeypatch.setattr(scripts["writer"], "TOP_K", 97)
    first = continue_rows(model, rows, temperature=1.0, max_new_tokens=8, seed=1)
    assert first == continue_rows(model, rows, temperature=1.0, max_new_tokens=8, seed=1)
    assert first != continue_rows(model, rows, temperature=1.0, max_new_tokens=8, seed=2)
    model.generation_config.eos_token_id = wanted[0][3]
    shorter = continue_rows(model, rows, temperature=0.0, max_new_tokens=8)[0]
    assert shorter == wanted[0][: wanted[0].index(wanted[0][3]) + 1]


def test_user_turns_are_of_every_kind_and_passages_are_the_targets_own_answers(scripts: dict[str, ModuleType]) -> None:
    openings = scripts["openings"]
    source = openings.Openings(random.Random(0), ["volcanoes"])
    answer = "The moon is round. " * 20
    source.take(answer)
    source.take("too short")
    turns = [source.first() for _ in range(600)]
    kinds = {
        "question": [turn for turn in turns if turn.text in openings.QUESTIONS],
        "subject": [turn for turn in turns if turn.text.endswith(" volcanoes")],
        "code": [turn for turn in turns if "def " in turn.text],
        "passage": [turn for turn in turns if answer in turn.text],
    }
    assert all(len(found) > 40 for found in kinds.values())
    assert not any(turn.complete for turn in kinds["question"] + kinds["subject"])
    begun = {turn.text.removesuffix(" volcanoes") for turn in kinds["subject"]}
    assert begun <= {question for question in openings.QUESTIONS if question[-1:].isalpha()}
    assert {turn.complete for turn in kinds["passage"]} == {True, False}
    assert all("{" not in task.format(name="", stub="", summary="", source="") for task in openings.CODE_TASKS)
    later = [source.further() for _ in range(200)]
    assert None in later
    assert {turn.complete for turn in later if turn} == {True, False}


@pytest.mark.embedded
def test_rows_alternate_as_the_chat_template_writes_them_and_end_when_full_or_when_an_answer_loops(
    scripts: dict[str, ModuleType], embedded_folder: Path
) -> None:
    generate, opening = scripts["generate"], scripts["openings"].Opening
    tokenizer = scripts["teacher"].load_tokenizer()
    turns = generate.Turns(tokenizer)
    assert "volcanoes" in turns.words
    assert {len(turns.encode(f" {word}")) for word in turns.words} == {1}
    assert min(map(len, turns.words)) == generate.LEAST_WORD

    class TwoTurns:
        """One turn that the target ends, and one that is complete; then none."""

        def __init__(self) -> None:
            self._later = iter([opening("And then?", complete=True), None])
            self.taken: list[str] = []

        def first(self) -> Any:
            return opening("Why", complete=False)

        def further(self) -> Any:
            return next(self._later)

        def take(self, answer: str) -> None:
            self.taken.append(answer)

    def write(script: Any, row: Any, text: str) -> bool:
        """Whether the row has taken all of it."""
        for token_id in turns.encode(text):
            if row.complete:
                return False
            script.advance(row, token_id)
        return True

    source = TwoTurns()
    script = generate._Script(turns, source, {2}, 400)
    row = script.begin(0.5)
    for text in (" is that?<|im_end|>", "Because.<|im_end|>", "Nothing.<|im_end|>"):
        assert write(script, row, text)
    assert row.complete
    chat = [("user", "Why is that?"), ("assistant", "Because."), ("user", "And then?"), ("assistant", "Nothing.")]
    written = [{"role": role, "content": content} for role, content in chat]
    assert tokenizer.decode(row.token_ids) + "\n" == tokenizer.apply_chat_template(written, tokenize=False)
    assert [turns.decode(answer) for answer in row.answers()] == ["Because.", "Nothing."]

    looping = script.begin(0.0)
    assert write(script, looping, "?<|im_end|>")
    assert not write(script, looping, "again and again " * 60)
    assert len(looping.token_ids) < 120
    script.keep(row)
    script.keep(looping)
    assert source.taken == ["Because.", "Nothing."]
    wordy = script.begin(0.0)
    assert not write(script, wordy, " and more" * 100)
    assert not any(wordy.answer)
    script = generate._Script(turns, TwoTurns(), {2}, len(turns.prefix) + generate.LEAST_ROOM + 2)
    full = script.begin(0.0)
    assert not write(script, full, "?<|im_end|>" + "".join(f" {number}" for number in range(100)))
    assert len(full.token_ids) == len(turns.prefix) + generate.LEAST_ROOM + 2


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


class Workshop:
    """A folder in which the scripts have made a draft of two layers from nothing."""

    training: ClassVar[dict[str, object]] = {"rows": 4, "lr": 0.0005}
    """Of every run here. Each has less than 100 steps: a longer warm-up would tell it from one with more epochs."""
    first: ClassVar[dict[str, object]] = {**training, "layers": "0,r", "vocab_size": 64}

    def __init__(self, scripts: dict[str, ModuleType], folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._scripts, self._patch, self.folder = scripts, patch, folder
        self.corpora, self.draft, self.shipped = folder / "corpora", folder / "draft", folder / "draft.safetensors"
        patch.setattr(scripts["train"], "HELD_OUT_SHARE", 0.1)
        patch.setattr(scripts["generate"], "LEAST_ROOM", 12)
        patch.setattr(scripts["openings"], "MOST_CHARACTERS", 200)
        self.generate(self.corpora)
        self.call("train", corpus=self.corpora, out=self.draft, epochs=12, **self.first)
        self.call("package", draft=self.draft, out=self.shipped)

    def call(self, name: str, **options: object) -> None:
        """A script by its command line."""
        arguments: list[str] = []
        for key, value in options.items():
            values = value if isinstance(value, list) else [value]
            arguments += [f"--{key.replace('_', '-')}", *(str(each) for each in values if each is not True)]
        self._patch.setattr(sys, "argv", [name, *arguments])
        self._scripts[name].main()

    def generate(self, out: Path) -> None:
        self.call("generate", out=out, parts=2, rows=10, length=72, slots=4)

    def train(self, name: str, **options: object) -> Path:
        """The folder of a run."""
        self.call("train", corpus=self.corpora, out=self.folder / name, **options)
        return self.folder / name

    def package(self, draft: Path, **options: object) -> DraftWeights:
        out = draft.with_suffix(".safetensors")
        self.call("package", draft=draft, out=out, **options)
        return read_draft(out)


@pytest.fixture(scope="module")
def workshop(scripts: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    with pytest.MonkeyPatch.context() as patch:
        yield Workshop(scripts, tmp_path_factory.mktemp("workshop"), patch)


def weights_of(draft: Path) -> bytes:
    return (draft / "weights.safetensors").read_bytes()


def curve_of(draft: Path) -> list[dict[str, float]]:
    curve: list[dict[str, float]] = json.loads((draft / "training.json").read_text())["curve"]
    return curve


@pytest.mark.embedded
@pytest.mark.timeout(300)
def test_a_draft_is_made_from_nothing_and_loads(workshop: Workshop, embedded_folder: Path) -> None:
    curve = curve_of(workshop.draft)
    assert curve[-1]["loss"] < curve[1]["loss"]  # the first is from before the first step
    draft = read_draft(workshop.shipped)
    assert (draft.num_layers, draft.facts["before"]) == (2, None)
    model = load_embedded_draft(
        embedded_folder,
        LoadOptions(numerics=Numerics(width=16, fixed=False), max_model_len=64),
        vocab_size=64,
        draft_file=workshop.shipped,
    )
    assert torch.isfinite(model.forward([1, 2, 3], model.new_cache(8)).logits).all()


@pytest.mark.embedded
@pytest.mark.timeout(300)
def test_rows_are_as_the_chat_template_writes_them_with_the_states_of_reading_them_whole(
    workshop: Workshop, scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    dataset, tokenizer = scripts["dataset"], scripts["teacher"].load_tokenizer()
    part, labelled = workshop.corpora / "000", tmp_path / "labelled"
    workshop.call("label", text=part / "text.npz", out=labelled, tokens_per_batch=256)
    (_, states), ((rows,), again) = dataset.read_corpora(part), dataset.read_corpora(labelled)
    assert rows.answer.any(axis=1).all()
    for row in range(rows.num_rows):
        token_ids, answer = rows.token_ids[row, : rows.length[row]], rows.answer[row, : rows.length[row]]
        text = tokenizer.decode(token_ids)
        parts = re.findall(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>\n|<\|im_end\|>$|$)", text, re.DOTALL)
        assert [role for role, _ in parts[1:]] == (["user", "assistant"] * len(parts))[: len(parts) - 1]
        whole = [{"role": role, "content": content} for role, content in parts]
        assert tokenizer.apply_chat_template(whole, tokenize=False).startswith(text)
        spoken = tokenizer.decode(token_ids[answer], skip_special_tokens=True)
        assert spoken == "".join(content for role, content in parts if role == "assistant")
        last = int(np.flatnonzero(answer)[-1])  # the state of the last token labels nothing
        written, read = states[row][:last].float(), again[row][:last].float()
        errors = (written - read).norm(dim=-1) / read.norm(dim=-1)
        assert errors.mean() < 0.05  # bfloat16 on AMX, 15 rows of 200 tokens: 0.017
        assert errors.max() < 0.5  # 0.06; another token's state is 1 or more away
    labelled_at = (labelled / "text" / "states.npy").stat().st_mtime_ns
    workshop.call("label", text=part / "text.npz", out=labelled)
    assert (labelled / "text" / "states.npy").stat().st_mtime_ns == labelled_at


@pytest.mark.embedded
@pytest.mark.timeout(300)
def test_a_part_is_the_same_each_time_and_passed_over_while_another_process_writes_it(
    workshop: Workshop, scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    with (tmp_path / "001.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        workshop.generate(tmp_path)
    assert not (tmp_path / "001").exists()
    written, again = (scripts["dataset"].read_text(folder / "000") for folder in (workshop.corpora, tmp_path))
    assert np.array_equal(written.token_ids, again.token_ids)


@pytest.mark.embedded
@pytest.mark.timeout(300)
def test_a_training_cut_off_or_given_more_epochs_ends_with_the_weights_of_one_run(
    workshop: Workshop, scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    class CutOffError(Exception):
        """As if the machine had gone."""

    learn = scripts["train"].Run.learn

    def learn_or_end(run: Any, rows: np.ndarray) -> None:
        if run.step == run.plateau_end + 3:
            raise CutOffError
        learn(run, rows)

    whole = workshop.train("whole", epochs=16, **workshop.first)
    with monkeypatch.context() as patch:
        patch.setattr(scripts["train"], "CHECKPOINT_SECONDS", 0)
        patch.setattr(scripts["train"].Run, "learn", learn_or_end)
        with pytest.raises(CutOffError):
            workshop.train("cut off", epochs=12, **workshop.first)
    cut_off = workshop.train("cut off", epochs=12, **workshop.first)
    assert weights_of(cut_off) == weights_of(workshop.draft)
    assert weights_of(workshop.train("cut off", epochs=16, **workshop.first)) == weights_of(whole)


def double(draft: Path) -> None:
    """Make weights clearly others than those of another run."""
    learned = draft / "weights.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(learned).items()}, learned)


def assert_mean(mean: DraftWeights, *drafts: DraftWeights) -> None:
    """Whether `mean` has the mean of the others' weights, but for the rounding to eight bits."""
    for name, tensor in mean.tensors.items():
        wanted = torch.stack([draft.tensors[name] for draft in drafts]).mean(dim=0)
        assert (tensor - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.embedded
@pytest.mark.timeout(300)
def test_a_draft_is_averaged_with_the_one_it_went_on_from(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    same = workshop.train("same size", draft_file=workshop.shipped, **workshop.first, epochs=1)
    double(same)
    before, after = read_draft(workshop.shipped), workshop.package(same)
    assert_mean(workshop.package(same, mean_with=workshop.shipped), before, after)
    with pytest.raises(SystemExit):
        workshop.package(same, mean_with=same.with_suffix(".safetensors"))
    assert "not the draft that" in capsys.readouterr().err


@pytest.mark.embedded
@pytest.mark.timeout(300)
def test_runs_from_one_draft_become_their_mean_and_others_are_refused(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (
        workshop.train(f"seed {seed}", draft_file=workshop.shipped, **workshop.first, epochs=1, seed=seed)
        for seed in (1, 2)
    )
    double(second)
    out = workshop.folder / "mean.safetensors"
    workshop.call("package", draft=[first, second], out=out)
    mean = read_draft(out)
    assert [run["seed"] for run in mean.facts["runs"]] == [1, 2]
    assert_mean(mean, workshop.package(first), workshop.package(second))
    for pair, refused in (
        ([first, workshop.draft], "another draft before it"),
        ([workshop.draft, workshop.draft], "trained from no draft"),
    ):
        with pytest.raises(SystemExit):
            workshop.call("package", draft=pair, out=out)
        assert refused in capsys.readouterr().err


@pytest.mark.embedded
@pytest.mark.timeout(300)
def test_a_draft_grows_by_a_layer_that_changes_nothing_at_first_and_by_tokens(workshop: Workshop) -> None:
    grown = {**workshop.training, "layers": "0,r,1", "epochs": 6}
    further = workshop.train("further", draft_file=workshop.shipped, vocab_size=64, **grown)
    continued, shipped = workshop.package(further), read_draft(workshop.shipped)
    assert (continued.num_layers, continued.facts["before"]) == (3, shipped.facts)
    assert continued.output_ids.tolist() == shipped.output_ids.tolist()
    before, curve = curve_of(workshop.draft)[-1], curve_of(further)
    assert curve[0]["greedy"] == before["greedy"]
    assert curve[-1]["loss"] < before["loss"]

    wider = workshop.package(workshop.train("wider", draft_file=workshop.shipped, vocab_size=96, **grown))
    assert wider.output_ids.tolist()[:64] == shipped.output_ids.tolist()
    assert len(set(wider.output_ids.tolist())) == 96


@pytest.mark.embedded
@pytest.mark.timeout(300)
def test_a_training_over_fewer_tokens_lists_as_many_as_the_draft_before_in_the_order_of_its_own_text(
    workshop: Workshop, scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = read_draft(workshop.shipped)
    backwards = workshop.folder / "backwards.safetensors"
    write_draft(backwards, dataclasses.replace(shipped, output_ids=shipped.output_ids.flip(0)))
    loss, learned = scripts["train"].negative_log_acceptance, set()

    def watch(states: Any, teacher_states: Any, head: Any, *rest: Any) -> Any:
        learned.add(len(head))
        return loss(states, teacher_states, head, *rest)

    monkeypatch.setattr(scripts["train"], "negative_log_acceptance", watch)
    fewer = {**workshop.first, "vocab_size": 32, "epochs": 1}
    draft = workshop.package(workshop.train("fewer", draft_file=backwards, **fewer))
    assert learned == {32}
    assert draft.output_ids.tolist() == shipped.output_ids.tolist()


@pytest.mark.embedded
@pytest.mark.timeout(300)
def test_a_compiled_training_ends_with_the_weights_of_a_plain_one(
    workshop: Workshop, scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with, used = torch.compile, set()

    def trace(function: Any, **_: object) -> Any:
        graphs = compile_with(function, backend="aot_eager")  # needs no C++ compiler

        def call(*args: Any) -> Any:
            used.add(getattr(function, "__name__", ""))
            return graphs(*args)

        return call

    monkeypatch.setattr(torch, "compile", trace)
    once = {**workshop.first, "draft_file": workshop.shipped, "epochs": 1}
    plain = workshop.train("plain", **once)
    assert not used
    traced = workshop.train("traced", compile=True, **once)
    assert used == {"loss_of_block", "_call_impl"}  # the second is the student
    before = read_draft(workshop.shipped).tensors
    of_both = [load_file(folder / "weights.safetensors") for folder in (plain, traced)]
    for name, tensor in of_both[0].items():
        change = (tensor - before[name]).norm()
        assert (tensor - of_both[1][name]).norm() <= 0.05 * change + 1e-6


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


@pytest.mark.embedded
@pytest.mark.timeout(300)
def test_the_mixture_is_fitted_to_every_answer_that_no_training_reads(
    workshop: Workshop,
    scripts: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(scripts["mixture"], "STEPS", 2)
    (text,), _ = scripts["dataset"].read_corpora(workshop.corpora / "000")
    held_out, _ = scripts["train"].split([text.num_rows])
    rows = list(scripts["mixture"].places_in(workshop.corpora / "000", read_draft(workshop.shipped)))
    counted = [int(text.answer[row, 1 : text.length[row]].sum()) for row in held_out]
    assert [len(row.p) for row in rows] == counted
    assert all(row.is_best.any() for row in rows)
    workshop.call("mixture", corpus=workshop.corpora, draft_file=workshop.shipped)
    rows_of_table = re.findall(r"^ +(\w+)(?: +[01]\.\d{4}){5} +[1-9]\d*$", capsys.readouterr().out, re.MULTILINE)
    assert rows_of_table == ["draft", "ships", "fitted"]


@pytest.mark.embedded
@pytest.mark.timeout(300)
def test_a_draft_is_judged_by_every_token_of_the_answers(workshop: Workshop, tmp_path: Path) -> None:
    answers, report = tmp_path / "answers.json", tmp_path / "report.json"
    prompt = [1, 9690, 198]
    tokens = read_draft(workshop.shipped).output_ids[:16].tolist()  # what the draft can propose, in some order
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
