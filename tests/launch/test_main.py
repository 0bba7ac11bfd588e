"""The `amusd` command up to the point where workers start: options, help, mistakes, start-up time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import amusd
from launch.keys import groups, keys
from launch.main import main
from launch.manual import COMMANDS
from tests.launch.processes import amusd_command, environment, run

MISTAKES = [
    ([], f"name a command: {', '.join(COMMANDS)}"),
    (["generat"], f"generat: no such command; allowed: {', '.join(COMMANDS)}; did you"),
    (["prompt=x"], "prompt=x: name a command first"),
    (["generate", "--multirn"], "--multirn: no such option; allowed: --help, --multirun, -h, -m, --version; did you"),
    (["generate", "promt=x"], "promt=x: no such key; did you mean 'prompt'?"),
    (["generate", "prompt=Why", "is", "the"], "is: expected key=value"),
    (["doctor", "-m"], "-m: `amusd doctor` looks at one configuration"),
    (
        ["bench", "draft_tensor_parallel_size=2"],
        "draft_tensor_parallel_size=2: `amusd bench` measures one process of each role; allowed: 1",
    ),
    (
        ["bench", "target_tensor_parallel_size=2"],
        "target_tensor_parallel_size=2: `amusd bench` measures one process of each role; allowed: 1",
    ),
    (["compare", "-m", "max_lookahead=4,no"], "max_lookahead=no: expected a whole number"),
    (["compare", "-m", "run_dir=choice(a,b)"], "run_dir: cannot be swept"),
    (["export-draft"], "export-draft: name the folder to write, and nothing else: amusd export-draft PATH"),
    (["export-draft", "/proc/nowhere"], "/proc/nowhere: "),
    (["keys"], "keys: name the folder to write, and nothing else: amusd keys FOLDER"),
    (["keys", "path=keys"], "keys: name the folder to write, and nothing else: amusd keys FOLDER"),
    (["keys", "/proc/nowhere"], "/proc/nowhere: cannot be used"),
    (["trace"], "trace: name the folder of a run, and nothing else: amusd trace RUN_DIR [sequence=N]"),
    (["trace", "run", "sequnce=1"], "trace: name the folder of a run, and nothing else"),
    (["trace", "run", "sequence=one"], "sequence=one: expected a whole number"),
    (["trace", "/proc/nowhere"], "/proc/nowhere: not a run directory: it has no folder events/"),
    (["generate", "run_dir=/proc/nowhere"], "run_dir=/proc/nowhere: cannot be used"),
    (["generate", "prompt=two\nlines", "x"], "x: expected key=value"),
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


def test_a_mistake_is_answered_by_the_real_command_without_a_traceback(tmp_path: Path) -> None:
    done = run(amusd_command("generate", "drafter=nope"), tmp_path)
    assert done.returncode == 2
    assert done.stderr == "amusd: drafter=nope: allowed: embedded, hf, ngram, synthetic\n"
    assert list(tmp_path.iterdir()) == []


def test_help_lists_every_group_and_key_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--help"]) == 0
    text = capsys.readouterr().out
    for group, options in groups().items():
        assert f"  {group}={' | '.join(options)}\n" in text
    for name in keys():
        assert f"\n  {name}=" in text
    assert "\n  max_lookahead=16\n" in text
    assert "how many tokens the draft may be ahead" in text


def test_the_overview_and_the_version_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "usage: amusd COMMAND" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"amusd {amusd.__version__}\n"


def test_every_key_is_documented_or_a_closed_choice() -> None:
    undocumented = {key.name for key in keys().values() if not key.doc and not key.allowed}
    assert undocumented == set()


def test_composing_and_describing_the_machine_import_no_torch() -> None:
    code = (
        "import sys; from launch import compose, jobs, main, sweep; compose.compose_config(['drafter=ngram']); "
        "from launch.environment import describe_environment; describe_environment(); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, timeout=60)
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
