"""The wheel: complete, and able to compose far from the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.launch.processes import ROOT

SOURCES = ("amusd", "launch", "conf", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / "source" / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q", "."]
    done = subprocess.run(
        [*command, "-w", str(folder)], cwd=folder / "source", capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_the_packages_their_data_and_every_configuration_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        "amusd/embedded/draft.safetensors",
        "amusd/embedded/README.md",
        "amusd/py.typed",
        "amusd/serving/page.html",
        "amusd_launch/main.py",
        "amusd_launch/run.py",
    }
    expected |= {f"amusd_launch/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "conf").rglob("*.yaml")}
    expected |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "amusd").rglob("*.py")}
    expected |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "amusd").rglob("*.jsonl")}
    assert expected <= names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"amusd", "amusd_launch"}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command in an environment that has the wheel alone; what it depends on is read from this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    python = folder / "bin" / "python"
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "-q", wheel],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    return folder / "bin" / "amusd"


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    variables = {"PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=240)


def test_the_installed_command_composes_in_another_folder(installed: Path, tmp_path: Path) -> None:
    done = run(installed, "compare", "pair=qwen3_8b", "experiment=demo", "--cfg", "job", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["target"]["model"] == "Qwen/Qwen3-8B"
    done = run(installed, "generate", "drafter=nope", folder=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("In 'config': Could not find 'drafter/nope'")
