"""The Dockerfile and `.dockerignore`, read: no image is built here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.processes import ROOT


def instructions() -> list[tuple[str, str]]:
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines)).splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined if line.strip())]


FOUND = instructions()
STAGES = "\n".join(f"{name} {rest}" for name, rest in FOUND).split("FROM ")[1:]


def only(name: str) -> str:
    (found,) = (rest for own, rest in FOUND if own == name)
    return found


def argument(name: str) -> str:
    (found,) = re.findall(rf"^ARG {name}=(\S*)$", "\n".join(" ".join(line) for line in FOUND), re.MULTILINE)
    return found


@pytest.mark.parametrize("name", ["TORCH", "PAIR"])
def test_versions_are_those_that_the_tests_run_with(name: str) -> None:
    (of_make,) = re.findall(rf"^{name} \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert argument(name) == of_make
    assert of_make in (ROOT / "constraints.txt").read_text().splitlines()
    assert "constraints.txt" in STAGES[1]


def test_requirements_are_read_from_the_project(tmp_path: Path) -> None:
    tomllib = pytest.importorskip("tomllib")
    (script,) = re.findall(r"python3 -c '(.*?)' \"\$EXTRAS\"", "\n".join(rest for _, rest in FOUND))
    extras = argument("EXTRAS")
    command = [sys.executable, "-c", script, f"{extras},gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = [line for name in (*extras.split(","), "gpu") for line in project["optional-dependencies"][name]]
    assert done.stdout.splitlines() == [*project["dependencies"], *optional]


def test_the_server_is_no_root_and_gets_the_signals_itself() -> None:
    last = STAGES[-1].splitlines()
    assert "USER 10001" in last
    assert last.index("USER 10001") > max(place for place, line in enumerate(last) if line.startswith("COPY"))
    assert json.loads(only("ENTRYPOINT"))[:2] == ["amusd", "serve"]  # a list: no shell keeps SIGTERM from it
    assert "CMD" not in {name for name, _ in FOUND}


def test_the_image_keeps_no_package_index_and_no_download() -> None:
    assert "PIP_NO_CACHE_DIR=1" in STAGES[1]
    for name, rest in FOUND:
        assert name != "RUN" or "apt-get install" not in rest or "rm -rf /var/lib/apt/lists/*" in rest
    assert [line for line in STAGES[-1].splitlines() if line.startswith(("RUN", "ADD"))] == []
