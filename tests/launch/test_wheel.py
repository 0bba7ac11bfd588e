"""The wheel: complete, and able to compose far from the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.launch.processes import ROOT

SOURCES = ("amusd", "launch", "conf", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without network from a copy, so that nothing is left in the checkout."""
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


def test_the_installed_command_composes_in_another_folder(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); "
        "from amusd_launch.compose import compose_config; import amusd_launch.keys as k; "
        "print(compose_config(['experiment=demo', 'drafter=ngram']).drafter.kind, k.conf_folder()); "
        "from amusd_launch.main import main; sys.exit(main(['generate', 'drafter=nope']))"
    )
    done = subprocess.run(
        [sys.executable, "-P" if sys.version_info >= (3, 11) else "-s", "-c", code],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout == f"ngram {tmp_path / 'site' / 'amusd_launch' / 'conf'}\n", done.stderr
    assert done.returncode == 2
    assert done.stderr == (
        "amusd: drafter=nope: allowed: cascade, custom, dflash, eagle, embedded, hf, medusa, ngram, self, synthetic; "
        "or a model: its folder, or OWNER/NAME of the hub\n"
    )
