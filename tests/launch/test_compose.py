"""Command line -> configuration: every file composes, texts arrive as typed, every mistake of ours is one line."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from amusd.config import DrafterConfig, RunConfig
from amusd.errors import ConfigError
from launch.compose import compose_config, conf_folder, for_hydra, text_of
from launch.main import COMMANDS

NEEDED = {
    "custom": ["drafter.factory=mine:make"],
    "self": ["drafter.num_layers=2"],
    **{name: ["{group}.model=/m"] for name in ("hf", "cascade", "eagle", "medusa", "dflash")},
}
FILES = sorted(conf_folder().glob("*/*.yaml"))

MISTAKES = [
    ("temperature=1", "Could not override 'temperature'."),
    ("sky", "Error parsing override 'sky'"),
    ("drafter=ngrams", "In 'config': Could not find 'drafter/ngrams' Available options in 'drafter': auto cascade"),
    ("target=hf", "target.model=None: a folder or hub name is needed with target=hf"),
    ("mode=sync", "mode=sync: expected one of autoregressive, synchronous, asynchronous"),
    ("max_lookahead=no", "max_lookahead=no: "),
    ("max_lookahead=${nothing}", "Interpolation key 'nothing' not found"),
    ("sampling=3", "sampling=3: "),
    ("sampling.temperature=-1", "sampling.temperature=-1"),
    ("max_lookahead=4,8", "Ambiguous value for argument 'max_lookahead=4,8'"),
]


@pytest.mark.parametrize(("override", "message"), MISTAKES, ids=[override for override, _ in MISTAKES])
def test_a_mistake_is_one_line_that_names_it(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config([override])
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_without_arguments_the_defaults_of_the_package_hold() -> None:
    assert compose_config([]) == compose_config(["pair=qwen3_8b", "pair=null"]) == RunConfig()


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


def test_a_file_changes_what_it_names_and_an_override_wins_over_it() -> None:
    config = compose_config(["experiment=acceptance_grid", "drafter=ngram", "sampling.max_new_tokens=5"])
    assert (config.compare.synchronous_lengths, config.drafter.kind) == ((2, 4), "ngram")
    assert config.sampling.max_new_tokens == 5


@pytest.mark.parametrize(
    ("argument", "kind", "model"),
    [
        ("drafter=ngram", "ngram", None),
        ("drafter=/other", "hf", "/other"),
        ("drafter.model=/m", "hf", "/m"),
    ],
)
def test_a_choice_of_drafter_holds_over_that_of_a_pair(argument: str, kind: str, model: str | None) -> None:
    drafter = compose_config(["pair=qwen3_8b", argument]).drafter
    assert (drafter.kind, drafter.model) == (kind, model)


def test_a_checkpoint_or_code_in_the_place_of_a_choice_is_short_for_both(tmp_path: Path) -> None:
    config = compose_config([f"target={tmp_path}", "drafter=it's/a name"])
    assert (config.target.kind, config.target.model) == ("hf", str(tmp_path))
    assert (config.drafter.kind, config.drafter.model) == ("hf", "it's/a name")
    drafter = compose_config(["drafter=mine.py:make", "drafter.options.path=a.txt", "drafter.options.n=2"]).drafter
    assert (drafter.kind, drafter.factory, dict(drafter.options)) == (
        "custom",
        "mine.py:make",
        {"path": "a.txt", "n": 2},
    )


@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.text("\\'\"${},[]=:ab\n "))
@settings(deadline=None)
def test_any_text_arrives_as_typed(text: str) -> None:
    assume(text != "null" and not text.startswith("choice(") and not (len(text) > 1 and text[0] == text[-1] in "'\""))
    (argument,) = for_hydra([f"prompt={text}"])
    config = OmegaConf.create({"prompt": OverridesParser.create().parse_override(argument).value()})
    assert OmegaConf.to_container(config, resolve=True) == {"prompt": text}


def test_a_quoted_text_and_null_keep_the_meaning_that_hydra_gives_them() -> None:
    config = compose_config(["prompt='null'", "run_dir=null", "sampling.stop=one, two", "hardware.devices=[cpu,cpu]"])
    assert (config.prompt, config.run_dir) == ("null", None)
    assert config.sampling.stop == ("one, two",)
    assert config.hardware.devices == ("cpu", "cpu")
    assert (text_of("run_dir='a b'"), text_of("run_dir=it's")) == ("a b", "it's")
    assert compose_config(["sampling.stop=[one,two]", "sampling.logit_bias={5: 2.0}"]).sampling.stop == ("one", "two")


def test_an_unnamed_drafter_that_is_no_model_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    named = compose_config(["target=hf", "target.model=/m", "drafter=ngram"])
    assert capsys.readouterr().err == ""
    assert compose_config(["target=hf", "target.model=/m"]).drafter == named.drafter == DrafterConfig(kind="ngram")
    assert capsys.readouterr().err.startswith("amusd: drafter=ngram (prompt lookup): none is named")


def test_a_pair_without_checkpoints_is_three_words() -> None:
    config = compose_config(["hardware.synthetic=llama-8b", "drafter=synthetic", "accept=0.8", "hardware=one_gpu"])
    assert config.hardware.devices == ("cuda:0", "cuda:0")
    assert config.engine().drafters == (DrafterConfig(kind="synthetic", accept=0.8),)
    assert dataclasses.replace(config, accept=None).engine().drafters == (DrafterConfig(kind="synthetic"),)
