"""Command line -> configuration: every file composes, texts arrive as typed, every mistake is one line."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from amusd.config import DrafterConfig, RunConfig, TargetConfig
from amusd.errors import ConfigError
from amusd.types import Mode
from launch import compose
from launch.compose import compose_config
from launch.keys import conf_folder, groups, keys
from launch.main import COMMANDS
from launch.overrides import expand_sweep, settle, text_value

NEEDS_A_MODEL = {"target": "target.model=/m", "drafter": "drafter.model=/m"}

MISTAKES = [
    ("promt=x", "promt=x: no such key; did you mean 'prompt'?"),
    ("temperature=1", "temperature=1: no such key; did you mean 'sampling.temperature'?"),
    ("drafter.modl=x", "drafter.modl=x: no such key; did you mean 'drafter.model'?"),
    ("max_lookahead.x=3", "max_lookahead.x=3: no such key"),
    ("hydra.run.dir=x", "hydra.run.dir=x: no such key; write run_dir=FOLDER"),
    ("hydra.verbose=true", "hydra.verbose=true: no such key; Hydra's own settings are not used"),
    ("hydra.searchpath=[x]", "hydra.searchpath=[x]: no such key; --config-dir FOLDER adds a folder"),
    (
        "hydra/launcher=submitit_slurm",
        "hydra/launcher=submitit_slurm: no such key; amusd starts its own workers; to sweep",
    ),
    ("+hydra/sweeper=optuna", "+hydra/sweeper=optuna: no such key; a sweep is the product of all choices"),
    (
        "target=/x/mine.yaml",
        "target=/x/mine.yaml: allowed: embedded, hf; or yours, with --config-dir FOLDER and FOLDER/target/",
    ),
    ("experiment=/nowhere/mine.yaml", "experiment=/nowhere/mine.yaml: [Errno 2] No such file or directory"),
    ("--config-dir=/nowhere", "--config-dir=/nowhere: no such folder"),
    ("--config-name=mine", "--config-name=mine: not in any folder; name one with --config-dir"),
    ("target@other=hf", "target@other=hf: no such key"),
    ("=5", "=5: no such key"),
    ("+extra=1", "+extra=1: no such key"),
    ("+mode=synchronous", "+mode=synchronous: keys are neither added nor deleted here; write mode=synchronous"),
    ("~mode=synchronous", "~mode=synchronous: keys are neither added nor deleted here"),
    ("~mode", "~mode: expected key=value"),
    ("sky", "sky: expected key=value; a value with spaces needs quotes"),
    (
        "drafter=nope",
        "drafter=nope: allowed: auto, cascade, custom, dflash, eagle, embedded, hf, medusa, ngram, self, synthetic",
    ),
    (
        "drafter=ngrams",
        (
            "drafter=ngrams: allowed: auto, cascade, custom, dflash, eagle, embedded, hf, medusa, ngram, self, "
            "synthetic; did you mean 'ngram'?"
        ),
    ),
    ("target=null", "target=null: allowed: embedded, hf"),
    ("target=gpt2", "target=gpt2: allowed: embedded, hf; or a model: its folder, or OWNER/NAME of the hub"),
    ("target=/a,/b", "target=/a,/b: several values are a sweep, which needs -m"),
    ("target={a:b}", "target={a:b}: allowed: embedded, hf"),
    ("experiment=demos", "experiment=demos: allowed: "),
    ("target=hf", "target.model: required with target=hf"),
    ("mode=sync", "mode=sync: allowed: autoregressive, synchronous, asynchronous; did you mean 'synchronous'?"),
    ("mode=", "mode=: allowed: autoregressive, synchronous, asynchronous"),
    ("max_lookahead=many", "max_lookahead=many: expected a whole number"),
    ("max_lookahead={a:1}", "max_lookahead={'a': 1}: expected a whole number"),
    ("max_lookahead=0", "max_lookahead=0: must be at least 1"),
    ("max_lookahead=${max_lookahead}", "max_lookahead=${max_lookahead}: "),
    ("max_lookahead=${nothing}", "max_lookahead=${nothing}: "),
    ("sampling=3", "sampling=3: has keys of its own: sampling.temperature, "),
    ("sampling.temperature=-1", "sampling.temperature=-1.0: must be at least 0"),
    ("mode=synchronous,asynchronous", "mode=synchronous,asynchronous: several values are a sweep, which needs -m"),
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


@pytest.mark.parametrize("others", [[], ["workload=smoke"], ["sampling.max_new_tokens=5"]])
def test_the_number_of_tokens_has_two_names_and_one_result(others: list[str]) -> None:
    sampling = compose_config(["sampling.max_tokens=5", *others]).sampling
    assert (sampling.max_new_tokens, sampling.max_tokens) == (5, None)


def test_the_number_of_tokens_is_given_once() -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config(["sampling.max_tokens=5", "sampling.max_new_tokens=128"])
    assert str(caught.value) == "sampling.max_tokens=5: is sampling.max_new_tokens, which is 128; give one"


def test_a_file_may_use_either_name_of_the_number_of_tokens(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("sampling:\n  max_tokens: 5\n")
    assert compose_config([f"experiment={file}"]).sampling.max_new_tokens == 5
    with pytest.raises(ConfigError, match=r"^sampling.max_tokens=5: is sampling.max_new_tokens, which is 7; give one$"):
        compose_config([f"experiment={file}", "sampling.max_new_tokens=7"])


def test_without_overrides_the_defaults_of_the_package_hold() -> None:
    assert compose_config([]) == RunConfig()


@pytest.mark.parametrize("choice", [f"{group}={name}" for group, names in groups().items() for name in names])
def test_every_configuration_file_composes(choice: str) -> None:
    group, _, name = choice.partition("=")
    model = [NEEDS_A_MODEL.get(group, "")]
    needed = {
        "hf": model,
        "cascade": model,
        "eagle": model,
        "medusa": model,
        "dflash": model,
        "custom": ["drafter.factory=mine:make"],
        "self": ["drafter.num_layers=2"],
    }.get(name, [])
    assert isinstance(compose_config([choice, *needed]), RunConfig)


@pytest.mark.parametrize(
    "file",
    [file for group in ("experiment", "pair") for file in sorted((conf_folder() / group).glob("*.yaml"))],
    ids=lambda file: file.stem,
)
def test_every_experiment_and_pair_begins_with_its_own_command(file: Path) -> None:
    package, comment = file.read_text(encoding="utf-8").splitlines()[:2]
    assert package == "# @package _global_"
    program, command, *arguments = shlex.split(comment.removeprefix("# "))
    assert program == "amusd"
    assert command in COMMANDS
    assert f"{file.parent.name}={file.stem}" in arguments
    for job in expand_sweep([argument for argument in arguments if argument != "-m"]):
        compose_config(job)


def test_every_experiment_compares_or_generates_with_few_tokens_on_the_embedded_pair() -> None:
    """Whoever types the command on a fresh machine gets a result, not a missing model."""
    for name in groups()["experiment"]:
        config = compose_config([f"experiment={name}"])
        assert config.target.kind == "embedded"
        assert config.drafter.kind in ("embedded", "ngram", "synthetic")
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
    assert expand_sweep(["accept=0.5,0.9", "drafter.shape=llama-1b"])[1] == ("accept=0.9", "drafter.shape=llama-1b")
    assert "qwen3-8b" in keys()["drafter.shape"].allowed


OWN_EXPERIMENT = """\
defaults:
  - demo
  - override /drafter: ngram
sampling: {max_new_tokens: 7}
"""


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


def test_an_experiment_may_lie_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "my experiments, all" / "mine.yaml"
    path.parent.mkdir()
    path.write_text(OWN_EXPERIMENT)
    config = compose_config([f"experiment={path}", "max_lookahead=9"])
    assert (config.drafter.kind, config.sampling.max_new_tokens, config.max_lookahead) == ("ngram", 7, 9)
    assert config.compare.drafters == ("embedded", "ngram")  # of `demo`, on which it builds
    path.write_text("sampling: {seed: 4}")
    assert compose_config([f"experiment={path}"]).sampling.seed == 4, "it was read anew"
    assert compose_config(["experiment=demo"]).sampling.seed == 0


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
        ("mode: quick", "mode=quick: allowed: autoregressive, synchronous, asynchronous"),
        ("sampling: 3", "sampling=3: has keys of its own"),
        ("a: [", "experiment=mine.yaml: while parsing"),
        ("- a", "experiment=mine.yaml: expected keys and values"),
        ("defaults: {override /drafter: ngram}", "experiment=mine.yaml: Invalid defaults list in"),
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
    config = compose_config([f"--config-dir={own}", "target=big", "experiment=short", "drafter=ngram"])
    assert config.target == TargetConfig(kind="hf", model="/models/big")
    assert config.sampling.max_new_tokens == 6
    config = compose_config([f"--config-dir={own}", "--config-name=mine", "max_lookahead=6", "target=big"])
    assert (config.max_lookahead, config.sampling.seed, config.target.model) == (6, 3, "/models/big")
    with pytest.raises(
        ConfigError, match=r"^target=bigg: allowed: big, embedded, hf; did you mean 'big'\?; or a model: its folder"
    ):
        compose_config([f"--config-dir={own}", "target=bigg"])
    with pytest.raises(ConfigError, match=r"^target=big: allowed: embedded, hf"):
        compose_config(["target=big"])
    with pytest.raises(ConfigError, match=f"^--config-name=yours: not in {re.escape(str(own))}$"):
        compose_config([f"--config-dir={own}", "--config-name=yours"])


def test_a_sweep_goes_over_files_of_ones_own(own: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("sampling: {seed: 4}")
    jobs = expand_sweep([f"--config-dir={own}", f"experiment={path},short"])
    assert [compose_config(job).sampling.seed for job in jobs] == [4, 0]
    assert compose_config(jobs[1]).sampling.max_new_tokens == 6


@given(text=st.text(st.characters(exclude_characters="\0", codec="utf-8")))
@example("Hello, world: what's 1+1=?")
@example("'one' and 'two'")
@example('{a: [1, 2], "b": ${x}} $(rm) `ls` \\ \\\' \n\t')
@example("choice(a,b)")
@example("")
def test_free_text_arrives_as_typed(text: str) -> None:
    assume(text != "null")
    assume(not (len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]) or "' and '" in text)
    for key in ("prompt", "run_dir", "target.model", "workload.path"):
        assert text_value(key, text) == text
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


@pytest.mark.parametrize("group", ["target", "drafter"])
@pytest.mark.parametrize("model", ["/models/of mine, 1", "owner/name", "./here", "~/models/x", "{a}/${b}"])
def test_a_model_alone_means_hf(group: str, model: str) -> None:
    config_of = TargetConfig if group == "target" else DrafterConfig
    assert getattr(compose_config([f"{group}.model={model}"]), group) == config_of(kind="hf", model=model)
    if "," not in model:
        assert getattr(compose_config([f"{group}={model}"]), group) == config_of(kind="hf", model=model)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["target=/m"],
            "amusd: drafter=ngram (prompt lookup): none is named, and the embedded draft fits the embedded ",
        ),
        (
            ["hardware.synthetic=llama-8b"],
            "amusd: drafter=synthetic: none is named, and the target's weights are random",
        ),
        (["target=/m", "mode=autoregressive"], ""),
        (["target=/m", "drafter=ngram"], ""),
        (["target=/m", "drafter=/d"], ""),
        ([], ""),
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


def test_a_folder_that_is_there_needs_no_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "hf"):
        (tmp_path / name).mkdir()
    assert compose_config(["target=mine"]).target == TargetConfig(kind="hf", model="mine")
    with pytest.raises(ConfigError, match=r"^target\.model: required with target=hf"):
        compose_config(["target=hf"])


@pytest.mark.parametrize("group", ["target", "drafter"])
def test_the_path_of_a_model_may_hold_any_character(group: str, tmp_path: Path) -> None:
    folder = tmp_path / "a,b [1] {x}" / "c=d, e"
    folder.mkdir(parents=True)
    for typed in (f"{group}={folder}", f"{group}='{folder}'"):
        assert getattr(compose_config([typed]), group).model == str(folder)
        assert expand_sweep([typed]) == [(typed,)]
    jobs = expand_sweep([f"{group}='{folder}',/other"])
    assert [getattr(compose_config(job), group).model for job in jobs] == [str(folder), "/other"]


def test_a_bias_is_a_mapping_or_a_list_of_pairs() -> None:
    for typed in ("{5:-100}", "{5: -100}", "[[5,-100]]"):
        assert compose_config([f"sampling.logit_bias={typed}"]).sampling.logit_bias == ((5, -100.0),)


def test_models_are_swept_as_choices_are() -> None:
    assert expand_sweep(["drafter=~/a {b}", "target=embedded,/c"]) == [
        ("drafter=~/a {b}", "target=embedded"),
        ("drafter=~/a {b}", "target=/c"),
    ]


def test_two_models_for_one_role_are_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"^target\.model=/b: target=/a names a model as well; leave one of them out$"
    ):
        compose_config(["target=/a", "target.model=/b"])
    with pytest.raises(ConfigError, match=r"^target\.model=/b: only allowed with target=hf, not with target=embedded$"):
        compose_config(["target=embedded", "target.model=/b"])


def test_a_complete_quoted_string_loses_its_quotes_and_null_is_no_text() -> None:
    config = compose_config(["prompt='it\\'s'", "sampling.stop=[\"a, b\", '${c}']", "run_dir=null"])
    assert config.prompt == "it's"
    assert config.sampling.stop == ("a, b", "${c}")
    assert config.run_dir is None
    assert compose_config(["prompt='null'"]).prompt == "null"


def test_a_sweep_is_the_product_of_its_choices_in_order() -> None:
    jobs = expand_sweep(["mode=synchronous", "num_speculative_tokens=range(2,5)", "max_lookahead=8,16"])
    assert jobs == [
        ("mode=synchronous", f"num_speculative_tokens={length}", f"max_lookahead={lookahead}")
        for length in (2, 3, 4)
        for lookahead in (8, 16)
    ]


def test_of_a_key_that_is_swept_twice_the_last_choice_holds() -> None:
    assert expand_sweep(["max_lookahead=4,16", "mode=synchronous", "max_lookahead=8"]) == [
        ("max_lookahead=8", "mode=synchronous")
    ]


def test_a_sweep_leaves_texts_whole_and_globs_over_a_group() -> None:
    jobs = expand_sweep(["prompt=one, two", "transport=glob(*)", "drafter.model=choice(/a,'/b c')"])
    assert {job[0] for job in jobs} == {"prompt=one, two"}
    assert [job[1:] for job in jobs] == [
        (f"transport={kind}", f"drafter.model={model}")
        for kind in ("auto", "gloo", "nccl", "shared_memory", "zeromq")
        for model in ("/a", "/b c")
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("max_lookahead=interval(1,2)", "max_lookahead=interval(1,2): an interval"),
        ("max_lookahead=glob(*)", "max_lookahead=glob(*): glob() chooses from a group"),
        (
            "drafter=glob(x*)",
            "drafter=glob(x*): matches none of auto, cascade, custom, dflash, eagle, embedded, hf, medusa, ngram, ",
        ),
        ("max_lookahead=range(4,4)", "max_lookahead=range(4,4): a sweep over nothing"),
        ("max_lookahed=1,2", "max_lookahed=1,2: no such key; did you mean 'max_lookahead'?"),
    ],
)
def test_a_mistaken_sweep_is_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}.*$"):
        expand_sweep([override])


def test_every_key_can_be_set_to_its_default_by_name() -> None:
    for key in keys().values():
        if isinstance(key.default, (int, float)):
            assert compose_config([f"{key.name}={str(key.default).lower()}"]) == RunConfig()


def test_a_prompt_that_looks_like_a_choice_is_a_prompt() -> None:
    assert expand_sweep(["prompt=choice(a,b)"]) == [("prompt=choice(a,b)",)]


def test_the_last_value_of_a_key_holds() -> None:
    assert settle(["max_lookahead=4", "fan_out=2", "max_lookahead=8"]) == {"max_lookahead": "8", "fan_out": "2"}
