"""The `amusd` command up to the point where workers start: options, help, mistakes, start-up time."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

import amusd
from amusd.config import RunConfig
from amusd.settings import from_mapping
from launch.keys import keys
from launch.main import main
from launch.manual import COMMANDS, own_keys
from tests.launch.processes import environment, run

MISTAKES = [
    ([], f"name a command: {', '.join(COMMANDS)}"),
    (["generat"], f"generat: no such command; allowed: {', '.join(COMMANDS)}; did you"),
    (["prompt=x"], "prompt=x: name a command first"),
    (
        ["generate", "--multirn"],
        "--multirn: no such option; allowed: --help, --multirun, --version, --cfg, --config-dir,",
    ),
    (["generate", "--cfg", "hydra"], "--cfg hydra: allowed: job; Hydra's own settings are not used"),
    (["compare", "-m", "-c", "job"], "--cfg job: prints one configuration; leave -m out"),
    (["generate", "workload.path=/nowhere"], "workload.path=/nowhere: [Errno 2] No such file or directory"),
    (["compare", "-m", "workload.num_prompts=2,99"], "workload.num_prompts=99: the built-in file has only 16"),
    (["generate", "prompt=Why", "is", "the"], "is: expected key=value"),
    (["doctor", "-m"], "-m: `amusd doctor` looks at one configuration"),
    (
        ["bench", "target_tensor_parallel_size=2"],
        "target_tensor_parallel_size=2: `amusd bench` measures one process of each role; allowed: 1",
    ),
    (["compare", "-m", "max_lookahead=4,no"], "max_lookahead=no: expected a whole number"),
    (["compare", "-m", "run_dir=choice(a,b)"], "run_dir: cannot be swept"),
    (["export-draft", "/proc/nowhere"], "/proc/nowhere: "),
    (["keys"], "keys: name the folder to write, and nothing else: amusd keys FOLDER"),
    (["keys", "/proc/nowhere"], "/proc/nowhere: cannot be used"),
    (["trace", "run", "sequence=one"], "sequence=one: expected a whole number"),
    (["trace", "/proc/nowhere"], "/proc/nowhere: not a run directory: it has no folder events/"),
    (["generate", "two\nlines"], "two\\nlines: expected key=value"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(a) or "nothing" for a, _ in MISTAKES])
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"amusd: {message}")
    assert printed.err.count("\n") == 1


def test_a_configuration_is_printed_as_it_would_be_saved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\nmax_lookahead: 5\n")
    typed = ["generate", "drafter=ngram", "prompt=it's, {me}", "-cd", str(tmp_path), "--config-name", "mine"]
    assert main([*typed, "--cfg", "job"]) == 0
    printed = capsys.readouterr().out
    values = {"max_lookahead": 5, "prompt": "it's, {me}", "drafter": {"kind": "ngram"}}
    assert from_mapping(RunConfig, yaml.safe_load(printed)) == from_mapping(RunConfig, values)
    (tmp_path / "again.yaml").write_text(printed)  # and can be started from
    assert main(["generate", "-cd", str(tmp_path), "-cn", "again", "-c", "job"]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("command", ["generate", "compare", "simulate", "bench", "doctor"])
def test_help_lists_the_groups_and_keys_of_a_command_with_their_defaults(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = {line.split("=")[0].strip() for line in lines[lines.index("keys:") :] if line[2:3].strip()}
    own = {key.name for key in own_keys(command)}
    assert listed & keys().keys() == own
    for other, foreign in (("bench", "bench."), ("simulate", "simulate."), ("compare", "compare.")):
        assert any(name.startswith(foreign) for name in own) == (command == other)
    assert any(line.startswith("  drafter=auto | cascade | custom | dflash") for line in lines)
    assert ("  pair=llama31_8b_eagle3 | " in "\n".join(lines)) == (command != "simulate")
    assert ("  experiment=" in "\n".join(lines)) == (command in ("generate", "compare"))
    assert len(lines) <= 150


def test_every_key_is_some_commands_own_and_has_its_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert {
        key.name
        for command in ("generate", "compare", "serve", "simulate", "bench", "doctor")
        for key in own_keys(command)
    } == (keys().keys())
    assert main(["generate", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert " max_lookahead=16 " in text
    assert "tokens that the draft may be ahead" in text


def test_the_overview_and_the_version_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "usage: amusd COMMAND" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"amusd {amusd.__version__}\n"


@pytest.mark.skipif(not entry_points(group="console_scripts", name="amusd"), reason="amusd is not installed here")
def test_python_runs_the_package_as_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "amusd"]
    assert run([*command, "--version"], tmp_path).stdout == f"amusd {amusd.__version__}\n"
    done = run([*command, "generate", "drafter=nope"], tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "amusd: drafter=nope: allowed: auto, cascade, custom, dflash, eagle, embedded, hf, medusa, ngram, self, "
        "synthetic; or a model"
    )


def test_every_key_is_documented_or_a_closed_choice() -> None:
    undocumented = {key.name for key in keys().values() if not key.doc and not key.allowed}
    assert undocumented == set()


def test_composing_and_describing_the_machine_import_no_torch() -> None:
    code = (
        "import sys; from launch import compose, jobs, main, sweep; compose.compose_config(['drafter=ngram']); "
        "from launch.environment import describe_environment; describe_environment(); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr


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
