"""What a document shows can be pasted: commands compose, files are there, and its Python runs."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from launch.compose import compose_config, config_of
from launch.main import main
from tests.launch.processes import ROOT, run

DOCUMENTS = sorted(
    path for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")) if path.name not in ("CHANGELOG.md", "log.md")
)
PLACEHOLDERS = {
    "ACCEPT": "0.8",
    "verify_ms=...": "verify_ms=25",
    "delay_ms=...": "delay_ms=0",
    "batch_size=B": "batch_size=4",
}
OWN_FILES = {
    "mine/experiment/pair.yaml": "# @package _global_\nmode: synchronous\n",
    "my_conf/start.yaml": "defaults: [config, _self_]\n",
    "my_conf/target/mine.yaml": "kind: embedded\n",
    "my_conf/experiment/mine.yaml": "# @package _global_\nmode: synchronous\n",
}
MODULES = {"writing_a_drafter.md": "tests/drafters/test_custom.py"}
PROGRAMS = {"amusd", "make", "python", ".venv/bin/python", "torchrun", "examples/sweep.sh"}


def blocks(path: Path, language: str = "") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


def commands(path: Path) -> Iterator[list[str]]:
    for block in blocks(path):
        text = block.replace("\\\n", " ")
        for placeholder, value in PLACEHOLDERS.items():
            text = text.replace(placeholder, value)
        for line in text.splitlines():
            try:
                words = shlex.split(line, comments=True)
            except ValueError:  # a picture
                continue
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words and words[0] in PROGRAMS and "..." not in words:  # else a picture of processes
                yield words


LINES = [(path, words) for path in DOCUMENTS for words in commands(path)]


@pytest.mark.parametrize(
    ("path", "words"), LINES, ids=[f"{path.name}: {' '.join(words)[:60]}" for path, words in LINES]
)
def test_a_command_line_can_be_pasted(
    path: Path, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in OWN_FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    program, *arguments = words
    if program == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {word for word in arguments if "=" not in word} <= targets
    elif program == "amusd":
        if "-m" in arguments:  # the first job of a sweep
            arguments = [word if "[" in word else word.split(",")[0] for word in arguments if word != "-m"]
        if arguments[0] not in ("trace", "keys", "export-draft") and "--cfg" not in arguments:
            assert main([*arguments, "--cfg", "job"]) == 0, capsys.readouterr().err
            config_of(OmegaConf.create(capsys.readouterr().out))
    elif program == "torchrun":
        compose_config([word for word in arguments if "=" in word and not word.startswith("--")])
    else:
        scripts = [word for word in words if word.endswith((".py", ".sh"))]
        assert all((ROOT / script).is_file() for script in scripts)


def test_every_file_that_a_document_names_is_there() -> None:
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        named = re.findall(r"`((?:docs|tests|examples|experiments|launch|amusd|conf)/[\w./-]*\w)`", text)
        missing = [name for name in named if not (ROOT / name).exists()]
        assert missing == [], path.name


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=block[:40], marks=() if path.name == "README.md" else pytest.mark.long)
        for path in DOCUMENTS
        if path.name not in MODULES
        for block in blocks(path, "python")
    ],
)
@pytest.mark.embedded
@pytest.mark.timeout(600)
def test_python_in_a_document_runs(block: str, tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(block.replace("max_new_tokens=64", "max_new_tokens=8"))
    done = run([sys.executable, "shown.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout
