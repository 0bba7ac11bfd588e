"""A cascade from checkpoints: its proposals, its refusals, and logits that are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from chains import propose, propose_together
from lines import refusal
from models import tiny
from oracle import OracleDrafter, always_right, always_wrong
from table_model import TableModel

from amusd.config import GREEDY, Distribution, DrafterConfig, EngineConfig, TargetConfig
from amusd.drafters.base import Drafter
from amusd.drafters.cascade import CascadeDrafter
from amusd.drafters.factory import load_drafters
from amusd.drafters.model import ModelDrafter
from amusd.drafters.ngram import NgramCache
from amusd.drafters.synthetic import Schedule
from amusd.models.passes import ModelOutput, Rows

MODEL = TableModel(20, seed=3, max_length=60)
PROMPT = (1, 2, 3)
PENALTIES = Distribution(temperature=0.8, seed=5, presence_penalty=0.7, repetition_penalty=1.3)
RATIO_TEST = Distribution(temperature=0.8, seed=5, acceptance="rejection")


def own_text(distribution: Distribution, number: int) -> tuple[int, ...]:
    alone = ModelDrafter(MODEL)
    alone.set_distribution(distribution)
    alone.open(PROMPT, 60)
    return tuple(propose(alone, number))


def step(drafters: Sequence[Drafter], paths: Sequence[list[int]], room: int = 60) -> list[tuple[int, ...]]:
    """The proposal of each drafter after its path."""
    return propose_together(drafters, paths, min(room, 5), room)


@pytest.mark.parametrize("schedule", [always_right(), always_wrong()], ids=["right", "wrong"])
@pytest.mark.parametrize("distribution", [GREEDY, PENALTIES, RATIO_TEST], ids=["greedy", "penalties", "ratio test"])
def test_what_the_inner_drafter_foresees_comes_in_one_pass(distribution: Distribution, schedule: Schedule) -> None:
    text, num_proposed = own_text(distribution, 15), 5 if schedule(0) else 1
    drafter = CascadeDrafter(MODEL, OracleDrafter((*PROMPT, *text), schedule, 20, 4))
    drafter.set_distribution(distribution)
    drafter.open(PROMPT, 60)
    for start in (0, num_proposed, 2 * num_proposed):
        assert step([drafter], [[*text[:start]]]) == [text[start : start + num_proposed]]
        assert len(drafter.take_draft_probs()) == (num_proposed if distribution is RATIO_TEST else 0)


def test_choices_before_one_without_numbers_are_dropped_with_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    text, run = own_text(RATIO_TEST, 15), MODEL.run
    drafter = CascadeDrafter(MODEL, OracleDrafter((*PROMPT, *text), always_right(), 20, 4))
    drafter.set_distribution(RATIO_TEST)
    drafter.open(PROMPT, 60)

    def spoilt(batch: Sequence[Rows], steps: int = 1) -> list[ModelOutput]:
        outputs = run(batch, steps)
        outputs[0].logits[2:] = float("nan")
        return outputs

    with monkeypatch.context() as patched:
        patched.setattr(MODEL, "run", spoilt)
        assert step([drafter], [[]]) == [()]
    assert not drafter.take_draft_probs()
    assert step([drafter], [[]]) == [text[:5]]


def test_the_inner_drafter_looks_up_before_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = ModelDrafter(TableModel(20, seed=3, max_length=60), NgramCache(2))
    drafter = CascadeDrafter(MODEL, inner)
    drafter.open((1, 2, 3, 1, 2), 60)
    monkeypatch.setattr(inner.model, "run", None)
    assert step([drafter], [[]])[0]


def checkpoint(folder: Path, name: str, num_layers: int, tokenizer: object = None, **changes: object) -> str:
    config = tiny.tiny_config(num_hidden_layers=num_layers, vocab_size=300, **changes)
    tiny.save_checkpoint(folder / name, config, tokenizer or tiny.byte_tokenizer())
    return str(folder / name)


@pytest.mark.parametrize("inner", ["ngram", "small"])
def test_a_cascade_of_checkpoints_proposes_what_its_model_would(tmp_path: Path, inner: str) -> None:
    middle = checkpoint(tmp_path, "middle", 2)
    inner = checkpoint(tmp_path, "small", 1) if inner == "small" else inner
    cascade = DrafterConfig(kind="cascade", model=middle, inner=inner, dtype="float32")
    alone = DrafterConfig(kind="hf", model=middle, dtype="float32")
    target = TargetConfig(kind="hf", model=middle)
    engine = EngineConfig(target=target, drafters=(cascade, alone), max_model_len=64)
    loaded = load_drafters(engine, "cpu")
    assert list(loaded.factories) == ["cascade", "hf"]
    texts = []
    for drafters in (make(2) for make in loaded.factories.values()):
        for number, drafter in enumerate(drafters):
            drafter.open((5, 6, 7, 5 + number), 40)
        proposed: list[list[int]] = [[], []]
        while min(map(len, proposed)) < 12:
            found = step(drafters, proposed)
            proposed = [text + list(tokens) for text, tokens in zip(proposed, found, strict=True)]
        texts.append([text[:12] for text in proposed])
    assert texts[0] == texts[1]


def test_an_inner_drafter_that_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    middle = checkpoint(tmp_path, "middle", 2)
    stranger = checkpoint(tmp_path, "stranger", 1, tiny.byte_tokenizer(("<end>",)))
    larger = tmp_path / "larger"
    tiny.save_checkpoint(larger, tiny.tiny_config(num_hidden_layers=1, vocab_size=310), tiny.byte_tokenizer())
    elsewhere = str(tmp_path / "elsewhere")  # else the target's tokens stand for those of all drafters

    def engine_of(inner: str, target: str) -> EngineConfig:
        config = DrafterConfig(kind="cascade", model=middle, inner=inner)
        return EngineConfig(target=TargetConfig(kind="hf", model=target), drafters=(config,), max_model_len=64)

    for inner, message in (
        (stranger, f"drafter.inner={stranger}: its tokenizer differs from that of {middle}"),
        (str(larger), f"drafter.inner={larger}: has 310 token ids, more than {middle} (300)"),
    ):
        assert refusal(partial(load_drafters, engine_of(inner, elsewhere), "cpu")) == message
    load_drafters(engine_of(str(larger), middle), "cpu")
