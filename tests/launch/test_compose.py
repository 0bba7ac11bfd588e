"""Command line -> configuration: every file composes, texts arrive as typed, every mistake of ours is one line."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lines import refusal
from omegaconf import OmegaConf

from amusd.commands import COMMANDS
from launch.compose import compose_config, conf_folder, for_hydra

NEEDED = {
    "custom": ["drafter.factory=mine:make"],
    "self": ["drafter.num_layers=2"],
    **{name: ["{group}.model=/m"] for name in ("hf", "cascade", "eagle", "medusa", "dflash")},
}
FILES = sorted(conf_folder().glob("*/*.yaml"))

COUNT = "expected a whole number from 1 to 2147483647"
MISTAKES = [
    ("temperature=1", "temperature=1: no such key; did you mean 'sampling.temperature'?"),
    ("+temperature=1", "temperature=1: no such key; did you mean 'sampling.temperature'?"),
    ("target.temprature=1", "target.temprature=1: no such key; did you mean 'sampling.temperature'?"),
    ("model=x", "model=x: no such key; did you mean 'target.model' or 'drafter.model'?"),
    ("--top-p=1", "--top-p=1: expected KEY=VALUE, without dashes; did you mean 'sampling.top_p'?"),
    ("sky", "sky: expected KEY=VALUE; a prompt is written prompt=sky"),
    ("is 1+1=2?", "is 1+1=2?: expected KEY=VALUE; a prompt is written prompt='is 1+1=2?'"),
    ("drafter=ngrams", "drafter=ngrams: expected auto, cascade, custom, dflash, eagle, "),
    ("experiment=nope", "experiment=nope: expected acceptance_grid, "),
    ("target=gpt2", "target=gpt2: expected embedded, hf, the folder or hub name (OWNER/NAME) of a checkpoint"),
    ("target=hf", "target.model=None: a folder or hub name is needed with target=hf"),
    ("max_lookahead=${nothing}", "max_lookahead: Interpolation key 'nothing' not found"),
    ("sampling=3", "sampling=3: expected a mapping"),
    (f"{'k' * 5000}=1", f"{'k' * 200}...: cannot be used"),
    (f"hardware={'c' * 5000}", f"hardware={'c' * 191}...: cannot be used"),
    ("sampling.temperature=-1", "sampling.temperature=-1: expected a number from 0 to 1000000"),
    ("max_lookahead=[4", f"max_lookahead=[4: {COUNT}"),
    ("max_lookahead=4,8", f"max_lookahead=4,8: {COUNT}; several values are a sweep, which needs -m"),
    ("drafter=ngram,self", "drafter=ngram,self: several values are a sweep, which needs -m"),
    (
        "sampling.logit_bias=1,2",
        "sampling.logit_bias=1,2: expected a list, each [a whole number from 0 to 2147483647, ",
    ),
]


@pytest.mark.parametrize(("override", "message"), MISTAKES, ids=[override[:40] for override, _ in MISTAKES])
def test_a_mistake_is_one_line_that_names_it(override: str, message: str) -> None:
    assert refusal(lambda: compose_config([override])).startswith(message)


def test_the_mistakes_in_the_documents_are_answered_so() -> None:
    documents = (Path(__file__).parents[2] / "docs/commands.md").read_text(encoding="utf-8")
    for argument in ("port=1", "mode=sync", "Why?"):
        assert f"`{refusal(partial(compose_config, [argument]))}`" in documents


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}={file.stem}")
def test_every_choice_composes_and_begins_with_its_own_command_where_it_says_one(file: Path) -> None:
    group, name = file.parent.name, file.stem
    arguments = [f"{group}={name}", *(text.format(group=group) for text in NEEDED.get(name, []))]
    if group in ("experiment", "pair"):
        package, comment = file.read_text(encoding="utf-8").splitlines()[:2]
        assert package == "# @package _global_"
        program, command, *arguments = shlex.split(comment.removeprefix("# "))
        assert (program, command in COMMANDS) == ("amusd", True)
        assert f"{group}={name}" in arguments
        arguments = [argument.split(",")[0] for argument in arguments if argument != "-m"]
    config = compose_config(arguments)
    if group == "experiment":
        assert config.target.kind == "embedded"
        assert config.sampling.max_new_tokens <= 128


@pytest.mark.parametrize("pair", ["qwen3_8b", "gpt_oss_20b"])
@pytest.mark.parametrize(
    ("arguments", "kind", "model"),
    [
        (["drafter=ngram"], "ngram", None),
        (["drafter=/other"], "hf", "/other"),
        (["drafter=hf", "drafter.model=/m"], "hf", "/m"),
        (["drafter=eagle", "drafter.model=/m"], "eagle", "/m"),
        (["drafter=mine.py:make"], "custom", None),
    ],
)
def test_a_choice_of_drafter_holds_over_that_of_a_pair(
    pair: str, arguments: list[str], kind: str, model: str | None
) -> None:
    drafter = compose_config([f"pair={pair}", *arguments]).drafter
    assert (drafter.kind, drafter.model) == (kind, model)


def test_the_model_of_a_pairs_drafter_may_be_another() -> None:
    drafter = compose_config(["pair=qwen3_8b", "drafter.model=/m"]).drafter
    assert (drafter.kind, drafter.model) == ("hf", "/m")


@pytest.mark.parametrize(("typed", "biases"), [("[[5,-1]]", ((5, -1.0),)), ("{5: -1}", ((5, -1.0),)), ("null", ())])
def test_biases_are_typed_as_pairs_or_as_a_mapping(typed: str, biases: tuple[tuple[int, float], ...]) -> None:
    assert compose_config([f"sampling.logit_bias={typed}"]).sampling.logit_bias == biases


@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.text("\\'\"${},[]=:ab\n "))
@settings(deadline=None)
def test_any_text_arrives_as_typed(text: str) -> None:
    assume(text != "null" and not text.startswith("choice(") and not (len(text) > 1 and text[0] == text[-1] in "'\""))
    (argument,) = for_hydra([f"prompt={text}"])
    config = OmegaConf.create({"prompt": OverridesParser.create().parse_override(argument).value()})
    assert OmegaConf.to_container(config, resolve=True) == {"prompt": text}
