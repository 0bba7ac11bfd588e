"""A model that cannot be loaded, through the real commands: one line, exit code 2, and nothing of the other worker."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launch.processes import amusd_command, run
from tests.launch.small_pair import save_pair

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked on Linux alone"),
]


@pytest.fixture(scope="module", params=["target", "draft"])
def broken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """The arguments of a pair one of which has a damaged file of weights, and the damaged one's folder."""
    folder = tmp_path_factory.mktemp("pair")
    arguments = save_pair(folder)
    weights = folder / request.param / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return arguments, weights.parent


def test_a_model_that_cannot_be_loaded_is_one_line_and_nothing_is_left(
    broken: tuple[list[str], Path], tmp_path: Path
) -> None:
    arguments, folder = broken
    command = "generate" if folder.name == "target" else "compare"
    done = run(amusd_command(command, "prompt=x", "workload.num_prompts=1", *arguments), tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "run directory" not in done.stderr  # which is gone
    *_, line = done.stderr.splitlines()
    assert line.startswith(f"amusd: model {folder}: model.safetensors: ")
    assert done.stderr.count(str(folder)) == 1
    assert list((tmp_path / "runs").iterdir()) == []
