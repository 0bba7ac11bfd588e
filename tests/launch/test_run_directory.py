"""The folder of a run: what is in it before the workers start, and when it is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from amusd.config import RunConfig, SamplingParams
from amusd.errors import ConfigError
from launch.run_directory import clear_run, create_run_directory, read_config


def test_it_holds_the_resolved_configuration_and_the_environment(tmp_path: Path) -> None:
    config = RunConfig(prompt="${x}: 'a'\n\u2028 ü", sampling=SamplingParams(stop=("no", "1e3", "~")))
    directory = create_run_directory(dataclasses.replace(config, run_dir=str(tmp_path / "deep" / "run")))
    assert sorted(path.name for path in directory.iterdir()) == ["config.yaml", "environment.json", "events"]
    saved = read_config(directory)
    assert (saved.prompt, saved.sampling, saved.run_dir) == (config.prompt, config.sampling, str(directory))
    environment = json.loads((directory / "environment.json").read_text())
    assert {"amusd", "python", "packages", "cpu", "gpus", "commit"} <= set(environment)
    assert {"torch", "transformers", "pyzmq", "hydra-core"} <= set(environment["packages"])
    assert environment["cpu"]["cores"] >= environment["cpu"]["allowed_cores"] >= 1


@pytest.mark.parametrize("mark", ["config.yaml", "sweep.json"])
def test_a_folder_that_holds_a_run_is_refused_and_left_alone(tmp_path: Path, mark: str) -> None:
    (tmp_path / mark).write_text("old")
    with pytest.raises(ConfigError, match=f"already holds a run \\({mark}\\)"):
        create_run_directory(RunConfig(run_dir=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == [mark]
    assert (tmp_path / mark).read_text() == "old"


def test_an_interrupted_run_is_cleared_for_another_try_and_notes_stay(tmp_path: Path) -> None:
    clear_run(tmp_path / "nowhere")
    directory = create_run_directory(RunConfig(run_dir=str(tmp_path / "run")))
    for name in (
        "workers.json",
        "result.json",
        "answers.jsonl",
        "partial.txt",
        "comparison.png",
        "timeline.svg",
        "events/draft.jsonl",
        "notes.txt",
    ):
        (directory / name).write_text("{}")
    clear_run(directory)
    assert [path.name for path in directory.iterdir()] == ["notes.txt"]
    assert create_run_directory(RunConfig(run_dir=str(directory))) == directory
