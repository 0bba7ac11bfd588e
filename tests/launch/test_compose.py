"""Command line -> configuration: every file composes, texts arrive as typed, every mistake is one line."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from amusd.config import DrafterConfig, RunConfig, TargetConfig
from amusd.errors import ConfigError
from amusd.types import Mode
from launch import compose
from launch.compose import compose_config
from launch.keys import conf_folder, groups, keys
from launch.main import COMMANDS
from launch.overrides import expand_sweep, settle, text_value

NEEDED = {
    "custom": ["drafter.factory=mine:make"],
    "self": ["drafter.num_layers=2"],
    **{name: ["{group}.model=/m"] for name in ("hf", "cascade", "eagle", "medusa", "dflash")},
}
"""What a choice cannot do without."""

MISTAKES = [
    ("temperature=1", "temperature=1: no such key; did you mean 'sampling.temperature'?"),
    ("hydra.verbose=true", "hydra.verbose=true: no such key; Hydra's own settings are not used"),
    (
        "target=/x/mine.yaml",
        "target=/x/mine.yaml: allowed: embedded, hf; or yours, with --config-dir FOLDER and FOLDER/target/",
    ),
    ("experiment=/nowhere/mine.yaml", "experiment=/nowhere/mine.yaml: [Errno 2] No such file or directory"),
    ("--config-dir=/nowhere", "--config-dir=/nowhere: no such folder"),
    ("--config-name=mine", "--config-name=mine: not in any folder; name one with --config-dir"),
    ("=5", "=5: no such key"),
    ("+mode=synchronous", "+mode=synchronous: keys are neither added nor deleted here; write mode=synchronous"),
    ("sky", "sky: expected key=value; a value with spaces needs quotes"),
    (
        "drafter=ngrams",
        (
            "drafter=ngrams: allowed: auto, cascade, custom, dflash, eagle, embedded, hf, medusa, ngram, self, "
            "synthetic; did you mean 'ngram'?"
        ),
    ),
    ("target=gpt2", "target=gpt2: allowed: embedded, hf; or a model: its folder, or OWNER/NAME of the hub"),
    ("target={a:b}", "target={a:b}: allowed: embedded, hf"),
    ("target=hf", "target.model: required with target=hf"),
    ("mode=sync", "mode=sync: allowed: autoregressive, synchronous, asynchronous; did you mean 'synchronous'?"),
    ("max_lookahead={a:1}", "max_lookahead={'a': 1}: expected a whole number"),
    ("max_lookahead=${max_lookahead}", "max_lookahead=${max_lookahead}: "),
    ("sampling=3", "sampling=3: has keys of its own: sampling.temperature, "),
    ("sampling.temperature=-1", "sampling.temperature=-1.0: must be at least 0"),
    ("hardware.devices=cpu,cpu", "hardware.devices=cpu,cpu: several values are a sweep, which needs -m; one list"),
    ("hardware.devices=[cpu", "hardware.devices=[cpu: cannot be read"),
    ("prompt=\udcff", "prompt='\\udcff': not valid UTF-8 text"),
]


@pytest.mark.parametrize(("override", "message"), MISTAKES, ids=[ascii(override) for override, _ in MISTAKES])
def test_a_mistake_is_one_line_that_names_it(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config([override])
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_without_overrides_and_with_every_default_by_name_the_defaults_of_the_package_hold() -> None:
    named = [
        f"{key.name}={str(key.default).lower()}" for key in keys().values() if isinstance(key.default, int | float)
    ]
    assert len(named) > 30
    assert compose_config([]) == compose_config(named) == RunConfig()


@pytest.mark.parametrize(
    "choice", [f"{group}={name}" for group in sorted({*groups()} - {"experiment", "pair"}) for name in groups()[group]]
)
def test_every_choice_of_a_group_composes(choice: str) -> None:
    group, _, name = choice.partition("=")
    needed = [text.format(group=group) for text in NEEDED.get(name, [])]
    assert isinstance(compose_config([choice, *needed]), RunConfig)


@pytest.mark.parametrize(
    "file",
    [file for group in ("experiment", "pair") for file in sorted((conf_folder() / group).glob("*.yaml"))],
    ids=lambda file: file.stem,
)
def test_every_experiment_and_pair_begins_with_its_own_command_and_an_experiment_needs_no_model(file: Path) -> None:
    package, comment = file.read_text(encoding="utf-8").splitlines()[:2]
    assert package == "# @package _global_"
    program, command, *arguments = shlex.split(comment.removeprefix("# "))
    assert program == "amusd"
    assert command in COMMANDS
    assert f"{file.parent.name}={file.stem}" in arguments
    *_, last = expand_sweep([argument for argument in arguments if argument != "-m"])
    config = compose_config(last)
    if file.parent.name == "experiment":
        assert config.target.kind == "embedded"
        assert config.sampling.max_new_tokens <= 128
        assert (config.workload.num_prompts or 0) <= 16


def test_a_file_changes_what_it_names_and_an_override_wins_over_it() -> None:
    config = compose_config(["experiment=synchronous_sweep", "drafter=ngram", "sampling.max_new_tokens=5"])
    assert config.mode is Mode.SYNCHRONOUS
    assert config.drafter == DrafterConfig(kind="ngram")
    assert config.sampling.max_new_tokens == 5
    assert compose_config(["experiment=demo", "experiment=null"]).prompt is None


def test_a_pair_without_checkpoints_is_three_words() -> None:
    config = compose_config(["hardware.synthetic=llama-8b", "drafter=synthetic", "accept=0.8", "hardware=one_gpu"])
    assert config.hardware.synthetic == "llama-8b"
    assert config.hardware.devices == ("cuda:0", "cuda:0")
    assert config.engine().drafters == (DrafterConfig(kind="synthetic", accept=0.8),)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder of the user's, whose name is nothing that a grammar likes."""
    folder = tmp_path / "my 'own' conf"
    for name, text in {
        "mine.yaml": "defaults: [config, _self_]\nmax_lookahead: 5\nsampling: {seed: 3}\n",
        "target/big.yaml": "kind: hf\nmodel: /models/big\n",
        "experiment/short.yaml": "# @package _global_\nsampling: {max_new_tokens: 6}\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_an_experiment_may_lie_anywhere_and_be_swept_over(own: Path, tmp_path: Path) -> None:
    path = tmp_path / "my experiments, all" / "mine.yaml"
    path.parent.mkdir()
    path.write_text("defaults: [demo, {override /drafter: ngram}]\nsampling: {max_new_tokens: 7}\n")
    config = compose_config([f"experiment={path}", "max_lookahead=9"])
    assert (config.drafter.kind, config.sampling.max_new_tokens, config.max_lookahead) == ("ngram", 7, 9)
    assert config.compare.drafters == ("embedded", "ngram")  # of `demo`, on which it builds
    path = tmp_path / "mine.yaml"
    path.write_text("sampling: {seed: 4}")
    jobs = expand_sweep([f"--config-dir={own}", f"experiment={path},short"])
    first, second = map(compose_config, jobs)
    assert (first.sampling.seed, second.sampling.seed, second.sampling.max_new_tokens) == (4, 0, 6)


@pytest.mark.parametrize("file", ["pair=qwen3_8b", "experiment=mine.yaml"])
def test_a_choice_of_model_holds_over_the_pair_or_experiment_that_names_another(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    models = "target: {kind: hf, model: /big, dtype: bfloat16}\ndrafter: {kind: eagle, model: /small}\n"
    Path("mine.yaml").write_text(models)
    found = {
        choice: (config.target.kind, config.drafter.kind, config.drafter.model)
        for choice in ("drafter=ngram", "drafter=/other", "drafter=medusa", "target=embedded")
        for config in (compose_config([file, choice]),)
    }
    own = compose_config([file]).drafter
    assert found == {
        "drafter=ngram": ("hf", "ngram", None),
        "drafter=/other": ("hf", "hf", "/other"),
        "drafter=medusa": ("hf", "medusa", own.model),
        "target=embedded": ("embedded", own.kind, own.model),
    }
    assert compose_config([file, "drafter.model=/m"]).drafter == dataclasses.replace(own, model="/m")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modee: synchronous", "modee: no such key; did you mean 'mode'?"),
        ("sampling: 3", "sampling=3: has keys of its own"),
        ("a: [", "experiment=mine.yaml: while parsing"),
        ("- a", "experiment=mine.yaml: expected keys and values"),
        ("defaults: [{override /drafter: nope}]", "experiment=mine.yaml: In 'config': Could not find 'drafter/nope'"),
    ],
)
def test_a_mistake_in_an_own_file_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose_config(["experiment=mine.yaml", "sampling.stop=x"])
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_folder_of_ones_own_adds_choices_and_a_configuration_to_start_from(own: Path) -> None:
    config = compose_config([f"--config-dir={own}", "--config-name=mine", "max_lookahead=6", "target=big"])
    assert (config.max_lookahead, config.sampling.seed) == (6, 3)
    assert config.target == TargetConfig(kind="hf", model="/models/big")
    with pytest.raises(
        ConfigError, match=r"^target=bigg: allowed: big, embedded, hf; did you mean 'big'\?; or a model: its folder"
    ):
        compose_config([f"--config-dir={own}", "target=bigg"])
    with pytest.raises(ConfigError, match=r"^target=big: allowed: embedded, hf"):
        compose_config(["target=big"])
    with pytest.raises(ConfigError, match=f"^--config-name=yours: not in {re.escape(str(own))}$"):
        compose_config([f"--config-dir={own}", "--config-name=yours"])


@settings(max_examples=40)
@given(text=st.text(st.characters(exclude_characters="\0", codec="utf-8")))
@example("Hello, world: what's 1+1=?")
@example("'one' and 'two'")
@example('{a: [1, 2], "b": ${x}} $(rm) `ls` \\ \\\' \n\t')
@example("choice(a,b)")
@example("")
def test_free_text_arrives_as_typed(text: str) -> None:
    assume(text != "null")
    assume(not (len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]) or "' and '" in text)
    assert text_value("prompt", text) == text
    assume(not text.startswith("["))
    assert text_value("sampling.stop", text) == [text]


def test_free_text_reaches_the_configuration_unchanged() -> None:
    text = "a,b: {c} [d] 'e' \"f\" ${g} \\h \n ünï=1"
    config = compose_config(
        [f"prompt={text}", f"sampling.stop={text}", "target=hf", f"target.model={text}", f"workload.path={text}"]
    )
    assert config.prompt == config.workload.path == text
    assert config.target == TargetConfig(kind="hf", model=text)
    assert config.sampling.stop == (text,)


def test_a_complete_quoted_string_loses_its_quotes_and_null_is_no_text() -> None:
    config = compose_config(["prompt='it\\'s'", "sampling.stop=[\"a, b\", '${c}']", "run_dir=null"])
    assert (config.prompt, config.sampling.stop, config.run_dir) == ("it's", ("a, b", "${c}"), None)
    assert compose_config(["prompt='null'"]).prompt == "null"


@pytest.mark.parametrize("group", ["target", "drafter"])
def test_a_model_alone_means_hf_whatever_its_path(group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config_of = TargetConfig if group == "target" else DrafterConfig
    folder = tmp_path / "a,b [1] {x}" / "c=d, e"
    for path in (folder, tmp_path / "mine", tmp_path / "hf"):
        path.mkdir(parents=True)
    for typed, model in {
        f"{group}.model=/models/of mine, 1": "/models/of mine, 1",
        f"{group}=owner/name": "owner/name",
        f"{group}=mine": "mine",
        f"{group}={folder}": str(folder),
        f"{group}='{folder}'": str(folder),
    }.items():
        assert getattr(compose_config([typed]), group) == config_of(kind="hf", model=model)
        assert expand_sweep([typed]) == [(typed,)]
    jobs = expand_sweep([f"{group}='{folder}',/other"])
    assert [getattr(compose_config(job), group).model for job in jobs] == [str(folder), "/other"]
    with pytest.raises(ConfigError, match=rf"^{group}\.model: required with {group}=hf"):
        compose_config([f"{group}=hf"])


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["target=/m"], "amusd: drafter=ngram (prompt lookup): none is named, and the embedded draft fits the "),
        (["hardware.synthetic=llama-8b"], "amusd: drafter=synthetic: none is named, and the target's weights are "),
        (["target=/m", "mode=autoregressive"], ""),
        (["target=/m", "drafter=/d"], ""),
    ],
)
def test_a_drafter_that_nobody_named_is_said_in_a_line(
    overrides: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    compose._say_once.cache_clear()
    compose_config(overrides)
    said = capsys.readouterr().err
    assert said.startswith(line) if line else said == ""
    assert said.count("\n") == bool(line)


def test_a_bias_is_a_mapping_or_a_list_of_pairs() -> None:
    for typed in ("{5:-100}", "[[5,-100]]"):
        assert compose_config([f"sampling.logit_bias={typed}"]).sampling.logit_bias == ((5, -100.0),)


def test_two_models_for_one_role_are_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"^target\.model=/b: target=/a names a model as well; leave one of them out$"
    ):
        compose_config(["target=/a", "target.model=/b"])
    with pytest.raises(ConfigError, match=r"^target\.model=/b: only allowed with target=hf, not with target=embedded$"):
        compose_config(["target=embedded", "target.model=/b"])


def test_a_sweep_is_the_product_of_its_choices_in_order_and_leaves_texts_whole() -> None:
    jobs = expand_sweep(["prompt=choice(a, b)", "num_speculative_tokens=range(2,5)", "max_lookahead=8,16"])
    assert jobs == [
        ("prompt=choice(a, b)", f"num_speculative_tokens={length}", f"max_lookahead={lookahead}")
        for length in (2, 3, 4)
        for lookahead in (8, 16)
    ]
    jobs = expand_sweep(["transport=glob(*)", "drafter.model=choice(/a,'/b c')"])
    assert jobs == [
        (f"transport={kind}", f"drafter.model={model}")
        for kind in ("auto", "gloo", "nccl", "shared_memory", "zeromq")
        for model in ("/a", "/b c")
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("max_lookahead=interval(1,2)", "max_lookahead=interval(1,2): an interval"),
        ("drafter=glob(x*)", "drafter=glob(x*): matches none of auto, cascade, custom, dflash, eagle, embedded, hf, "),
        ("max_lookahead=range(4,4)", "max_lookahead=range(4,4): a sweep over nothing"),
        ("max_lookahed=1,2", "max_lookahed=1,2: no such key; did you mean 'max_lookahead'?"),
    ],
)
def test_a_mistaken_sweep_is_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}.*$"):
        expand_sweep([override])


def test_the_last_value_of_a_key_holds() -> None:
    assert settle(["max_lookahead=4", "fan_out=2", "max_lookahead=8"]) == {"max_lookahead": "8", "fan_out": "2"}
    assert expand_sweep(["max_lookahead=4,16", "mode=synchronous", "max_lookahead=8"]) == [
        ("max_lookahead=8", "mode=synchronous")
    ]
