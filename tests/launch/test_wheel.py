"""The installed package is complete and composes far from the checkout; the image has the versions that are tested."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.launch.processes import ROOT

SOURCES = ("amusd", "launch", "conf", "pyproject.toml", "README.md", "LICENSE")


def run(*command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", **variables}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what an installation adds; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("installed")
    for name in SOURCES:
        source, copy = ROOT / name, folder / "source" / name
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-q", "--target", str(folder / "packages")]
    done = run(sys.executable, "-m", "pip", "install", *options, ".", folder=folder / "source")
    assert done.returncode == 0, done.stderr
    return folder / "packages"


def test_an_installation_has_the_packages_their_data_and_every_configuration_file(installed: Path) -> None:
    names = {path.relative_to(installed).as_posix() for path in installed.rglob("*") if path.is_file()}
    expected = {"amusd/embedded/draft.safetensors", "amusd/embedded/README.md", "amusd/py.typed"}
    expected |= {"amusd/serving/page.html", "amusd_launch/main.py", "amusd_launch/run.py"}
    expected |= {f"amusd_launch/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "conf").rglob("*.yaml")}
    expected |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "amusd").rglob("*.py")}
    expected |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "amusd").rglob("*.jsonl")}
    assert expected <= names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"amusd", "amusd_launch", "bin"}


def test_the_installed_command_composes_in_another_folder(installed: Path, tmp_path: Path) -> None:
    command, path = [sys.executable, str(installed / "bin" / "amusd")], str(installed)
    arguments = ["compare", "pair=qwen3_8b", "experiment=demo", "--cfg", "job"]
    done = run(*command, *arguments, folder=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["target"]["model"] == "Qwen/Qwen3-8B"
    done = run(*command, "generate", "drafter=nope", folder=tmp_path, PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("amusd: drafter=nope: expected auto, cascade, ")


@pytest.mark.parametrize("name", ["TORCH", "PAIR"])
def test_versions_are_those_that_the_tests_run_with(name: str) -> None:
    (of_make,) = re.findall(rf"^{name} \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert re.findall(rf"^ARG {name}=(\S*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE) == [of_make]
    assert of_make in (ROOT / "constraints.txt").read_text().splitlines()
