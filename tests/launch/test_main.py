"""The `amusd` command up to the point where workers start: help, mistakes, Hydra's own options, start-up time."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf

import amusd
from amusd.commands import COMMANDS
from launch.main import main
from tests.launch.processes import run

LISTEN = "listen=tcp://127.0.0.1:5"
RANDOM = ["generate", "prompt=x", "hardware.synthetic=smollm2-135m", "drafter=ngram"]
MISTAKES = [
    ([], "name a command first; allowed: generate, "),
    (["prompt=x"], "prompt=x: name a command first"),
    (["serve", "-m"], "-m: `amusd serve` has one configuration"),
    (["doctor", "-m"], "-m: `amusd doctor` has one configuration"),
    (["generate", "workload.path=/nowhere"], "workload.path=/nowhere: cannot be read (No such file or directory)"),
    (["serve", "--port", "9000"], "--port: expected KEY=VALUE, without dashes; did you mean 'serve.port'?"),
    (["generate", "Why not?", "-m"], "Why not?: expected KEY=VALUE; a prompt is written prompt='Why not?'"),
    (["generate", "-m", "promt=a,b"], "promt=a,b: no such key; did you mean 'prompt'?"),
    (["generate", "-m", "drafter=ngrams"], "drafter=ngrams: expected auto, "),
    (["generate", "-m", "run_dir=/proc/x"], "run_dir=/proc/x: cannot be used (No such file or directory)"),
    (["generate", "--cfg", "jobs"], "argument --cfg/-c: invalid choice: 'jobs'"),
    (["bench", "target_tensor_parallel_size=2"], "target_tensor_parallel_size=2: `amusd bench` measures one process"),
    (["compare", "target=/nope", "drafter=ngram"], "model /nope: no such folder"),
    (["generate", "prompt=x", "drafter=/proc"], "model /proc: no config.json in it"),
    (["generate", "prompt=x", "drafter=hf", "drafter.model=a/b/c"], "model a/b/c: no such folder"),
    (["generate", "prompt=x", "drafter=/nope.py:make"], "drafter.factory=/nope.py: no such file"),
    (["bench", "hardware.num_threads=2147483647"], "hardware.num_threads=2147483647: this machine has "),
    (["simulate", "accept=0.8"], "accept=0.8: only allowed with drafter=synthetic, or to simulate, with verify_ms"),
    (["draft", "drafter=ngram"], "listen=None: required with `amusd draft`, and only there"),
    (["draft", "listen=here"], "listen=here: expected tcp://HOST:PORT"),
    (["draft", "listen=tcp://0.0.0.0:5"], "listen=tcp://0.0.0.0:5: not on this machine, and the link is neither"),
    (["draft", LISTEN, "transport.keys=nowhere"], "transport.keys=nowhere: draft.key_secret: no keys in it"),
    (["draft", LISTEN, "drafter=hf", "drafter.model=a/b/c"], "model a/b/c: no such folder"),
    (["generate", LISTEN], "listen=tcp://127.0.0.1:5: required with `amusd draft`, and only"),
    (["generate", "drafter.address=there"], "drafter.address=there: expected tcp://HOST:PORT"),
    (["generate", "drafter.address=tcp://10.0.0.1:5"], "drafter.address=tcp://10.0.0.1:5: not on this machine"),
    (["generate", "transport.keys=keys"], "transport.keys=keys: protects the link at transport.address, drafter.addr"),
    (["doctor", "drafter.address=tcp://127.0.0.1:5"], "drafter.address=tcp://127.0.0.1:5: `amusd doctor` looks at"),
    ([*RANDOM, "transport.address=there"], "transport.address=there: expected ipc://PATH or tcp://HOST:PORT"),
    ([*RANDOM, "transport.address=ipc:///x", "transport.keys=none"], "transport.keys=none: target.key_secret: no keys"),
    (["generate", "policy=nowhere:make"], "policy=nowhere:make: raises ModuleNotFoundError: No module named"),
    (["compare", "compare.policies=[auto,x:y]"], "policy=x:y: raises ModuleNotFoundError: No module named"),
    (
        ["serve", "serve.host=0.0.0.0", "drafter=cascade", "policy=branching"],
        "policy=branching: drafter=cascade drafts no trees; allowed: ",
    ),
    (["export-draft", "/proc/nowhere"], "/proc/nowhere: "),
    (["keys"], "keys: name one folder, and nothing else: amusd keys FOLDER"),
    (
        ["trace", "run", "sequence=1", "x=2"],
        "trace: name one folder, and nothing else: amusd trace RUN_DIR",
    ),
    (["trace", "/proc/nowhere"], "/proc/nowhere/events: hold no answer; is it a run directory"),
    (["trace", "/proc/max_lookahead=4"], "/proc/max_lookahead=4/events: hold no answer; is it a run directory"),
    (["doctor", "drafter=medusa", "drafter.model=/m"], "drafter=medusa: cannot run ahead of the target, "),
    (["compare", "pair=qwen3_8b", "drafter=ngram,self"], "drafter=ngram,self: several values are a sweep, which needs"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(a) or "nothing" for a, _ in MISTAKES])
def test_a_mistake_is_one_line_on_stderr_exit_code_2_and_nothing_left_behind(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"amusd: {message}")
    assert list(tmp_path.glob("runs/*")) == []


@pytest.mark.embedded
@pytest.mark.parametrize("size", [12, 2147483647])
def test_more_ranks_than_key_heads_are_refused_before_any_is_started(
    size: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("DraftSource", "ForkServer"):
        monkeypatch.setattr(f"amusd.runtime.workers.{name}", Mock(side_effect=AssertionError("it was started")))
    assert main(["generate", "prompt=x", f"target_tensor_parallel_size={size}"]) == 2
    assert f"target_tensor_parallel_size={size}: each rank needs a key head; allowed: 1 to 3" in capsys.readouterr().err
    assert list(tmp_path.glob("runs/*")) == []


def test_a_configuration_is_printed_and_may_start_from_a_file_of_ones_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, text in {
        "mine.yaml": "defaults: [config, _self_]\nmax_lookahead: 5\n",
        "target/big.yaml": "kind: hf\nmodel: /models/big\n",
        "experiment/short.yaml": "# @package _global_\nsampling: {max_new_tokens: 6}\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    typed = ["generate", "drafter=ngram", "prompt=it's, {me}", "target=big", "experiment=short"]
    assert main([*typed, "-cd", str(tmp_path), "--config-name", "mine", "--cfg", "job"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["max_lookahead"], printed["prompt"]) == (5, "it's, {me}")
    assert printed["target"]["model"] == "/models/big"
    assert printed["sampling"]["max_new_tokens"] == 6


@pytest.mark.parametrize(
    ("file", "typed", "expected"),
    [
        ("drafter: {kind: hf, model: /m}", ["drafter=ngram"], {"drafter.kind": "ngram", "drafter.model": None}),
        ("drafter: {kind: ngram}", ["drafter.model=/m", "drafter=hf"], {"drafter.kind": "hf", "drafter.model": "/m"}),
        ("drafter: {options: {path: a}}", ["drafter.options.path=b"], {"drafter.options": {"path": "b"}}),
        ("hardware: {devices: [cuda:0]}", ["hardware=cpu"], {"hardware.devices": ["cpu", "cpu"]}),
        ("max_lookahead: 4", ["hardware=8b_1_1", "max_lookahead=5"], {"hardware.devices": ["cuda:0", "cuda:1"]}),
    ],
)
def test_what_is_typed_holds_over_a_file_of_ones_own(
    file: str, typed: list[str], expected: dict[str, object], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(f"defaults: [config, _self_]\n{file}\n")
    assert main(["generate", *typed, "-cd", str(tmp_path), "--config-name", "mine", "--cfg", "job"]) == 0
    config = OmegaConf.create(capsys.readouterr().out)
    assert {key: OmegaConf.select(config, key) for key in expected} == expected


def test_a_signal_before_the_first_job_of_a_sweep_is_no_mistake(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("launch.main._hydra", Mock(side_effect=KeyboardInterrupt(15)))
    assert main(["generate", "-m", "max_lookahead=4,8"]) == 128 + 15
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.glob("runs/*")) == []


def test_help_lists_commands_groups_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n  {name} " in overview
        assert callable(import_module(f"amusd.commands.{name.replace('-', '_')}").run)
    assert main(["generate", "--help"]) == 0
    text = capsys.readouterr().out
    assert "drafter: auto, cascade, custom, dflash" in text
    assert "\nmax_lookahead: 16\n" in text
    assert main(["trace", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: amusd trace RUN_DIR [sequence=N]\n")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"amusd {amusd.__version__}\n"


@pytest.mark.parametrize("options", [[], ["hydra.verbose=false"]])
def test_the_doctor_is_called_with_and_without_options_of_hydra_and_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("amusd.commands.doctor.run", doctor := Mock(return_value=2))
    assert main(["doctor", *options]) == 2
    doctor.assert_called_once()
    assert list(tmp_path.glob("runs/*")) == []


@pytest.mark.parametrize(
    ("line", "number"),
    [("amusd --version", 0), ("amusd trace", 0), ("amusd -sc install=bash", 0), ("amusd serve -m", 1)],
)
def test_only_what_computes_starts_again_for_huge_pages(
    monkeypatch: pytest.MonkeyPatch, line: str, number: int
) -> None:
    monkeypatch.setattr(sys, "argv", line.split())
    monkeypatch.setattr("launch.main.restart_with_huge_pages", restart := Mock())
    main()
    assert restart.call_count == number


@pytest.mark.skipif(not entry_points(group="console_scripts", name="amusd"), reason="amusd is not installed here")
def test_python_runs_the_package_as_the_command(tmp_path: Path) -> None:
    done = run([sys.executable, "-m", "amusd", "--version"], tmp_path)
    assert done.stdout == f"amusd {amusd.__version__}\n"


@pytest.mark.embedded
def test_the_embedded_draft_is_written_where_it_is_wanted_and_never_over_something(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "draft"
    assert main(["export-draft", str(folder)]) == 0
    written = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= written
    assert main(["export-draft", str(folder)]) == 2
    assert "not empty; name a new folder" in capsys.readouterr().err
    assert {path.name for path in folder.iterdir()} == written
