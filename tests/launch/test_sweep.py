"""A sweep: one folder, one job after another, one summary, one exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from amusd.config import RunConfig
from amusd.errors import ConfigError
from launch import sweep
from launch.jobs import JobOutcome

OVERRIDES = ["prompt=a,b", "max_lookahead=4,8,16"]


class FakeJobs:
    """Stands in for `run_job`: the exit code of each job is given."""

    def __init__(self, *outcomes: int | str) -> None:
        self._outcomes = list(outcomes)
        self.lookaheads: list[int] = []

    def __call__(self, command: str, config: RunConfig, *, folder: Path, roles: str | None) -> JobOutcome:
        self.lookaheads.append(config.max_lookahead)
        outcome = self._outcomes[len(self.lookaheads) - 1]
        if isinstance(outcome, str):
            raise ConfigError(outcome)
        folder.mkdir()
        rows = [{"mode": "asynchronous", "tokens_per_second": 12.345}]
        (folder / "result.json").write_text(json.dumps({"rows": rows}))
        return JobOutcome(exit_code=outcome, run_directory=folder, interrupted=outcome >= 128)


def run_with(jobs: FakeJobs, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[dict[str, Any]]]:
    monkeypatch.setattr(sweep, "run_job", jobs)
    code = sweep.run_sweep("compare", [*OVERRIDES, f"run_dir={folder}"])
    return code, json.loads((folder / "sweep.json").read_text())


def test_every_job_runs_in_its_own_folder_and_a_table_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = FakeJobs(0, 0, 0)
    code, summary = run_with(jobs, tmp_path, monkeypatch)
    assert code == 0
    assert jobs.lookaheads == [4, 8, 16]
    assert [job["run_dir"] for job in summary] == [str(tmp_path / number) for number in "012"]
    assert [job["overrides"][1] for job in summary] == ["max_lookahead=4", "max_lookahead=8", "max_lookahead=16"]
    table = capsys.readouterr().out
    assert table.count("exit 0") == 3
    assert table.count("mode=asynchronous  tokens_per_second=12.3\n") == 3


def test_a_failed_job_is_remembered_and_the_others_still_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, summary = run_with(FakeJobs(0, 1, "run_dir=x: full"), tmp_path, monkeypatch)
    assert code == 1
    assert [job["exit_code"] for job in summary] == [0, 1, 2]


def test_an_interruption_ends_the_sweep_and_keeps_what_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = FakeJobs(0, 130, 0)
    code, summary = run_with(jobs, tmp_path, monkeypatch)
    assert code == 130
    assert [job["exit_code"] for job in summary] == [0, 130]


def test_a_mistake_in_the_last_job_is_found_before_the_first_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = FakeJobs(0, 0)
    monkeypatch.setattr(sweep, "run_job", jobs)
    with pytest.raises(ConfigError, match="max_lookahead=0: must be at least 1"):
        sweep.run_sweep("compare", ["max_lookahead=4,0", f"run_dir={tmp_path}"])
    assert jobs.lookaheads == []
    assert list(tmp_path.iterdir()) == []
