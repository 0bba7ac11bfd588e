"""A sweep: one job after another, each with its own pair of workers, and one summary at the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from amusd.config import RunConfig
from amusd.errors import ConfigError

from .compose import compose_config
from .jobs import JobOutcome, run_job
from .overrides import expand_sweep
from .run_directory import RESULT_FILE, choose_folder, claim_folder, write_whole
from .terminal import tell

SUMMARY_FILE = "sweep.json"
_COLUMNS = ("mode", "tokens_per_second", "speedup_vs_autoregressive", "acceptance_rate")


def run_sweep(command: str, overrides: Sequence[str], *, roles: str | None = None) -> int:
    """Run every job; return 0, or the exit code of the first that failed.

    All jobs are composed before the first starts, so that a mistake in the last costs nothing: raises `ConfigError`.
    A job that fails does not stop the others; an interruption does.
    """
    jobs = [(job, compose_config(job)) for job in expand_sweep(overrides)]
    if len({config.run_dir for _, config in jobs}) > 1:
        raise ConfigError("run_dir: cannot be swept; the jobs of a sweep are numbered inside one folder")
    folder = claim_folder(choose_folder(jobs[0][1]))
    tell(f"{len(jobs)} jobs in {folder}")
    done: list[dict[str, Any]] = []
    exit_code = 0
    for number, (job, config) in enumerate(jobs):
        tell(f"job {number}: {' '.join(job)}")
        outcome = _run_or_tell(command, config, folder / str(number), roles)
        exit_code = exit_code or outcome.exit_code
        done.append(_summary_of(number, job, outcome))
        write_whole(folder / SUMMARY_FILE, json.dumps(done, indent=2) + "\n")
        if outcome.interrupted:
            return outcome.exit_code
    if jobs[0][1].output == "text":
        sys.stdout.write(_table(done))
    return exit_code


def _run_or_tell(command: str, config: RunConfig, folder: Path, roles: str | None) -> JobOutcome:
    try:
        return run_job(command, config, folder=folder, roles=roles)
    except ConfigError as error:
        tell(str(error))
        return JobOutcome(exit_code=2, run_directory=folder)


def _summary_of(number: int, job: Sequence[str], outcome: JobOutcome) -> dict[str, Any]:
    path = outcome.run_directory / RESULT_FILE
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {
        "job": number,
        "overrides": list(job),
        "exit_code": outcome.exit_code,
        "run_dir": str(outcome.run_directory),
        "rows": _rows_of(result),
    }


def _rows_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a comparison; of an answer, its figures; nothing when the job did not come that far."""
    if "metrics" in result:
        return [{"mode": result["mode"], **result["metrics"]}]
    rows: list[dict[str, Any]] = result.get("rows", [])
    return rows


def _table(done: Sequence[dict[str, Any]]) -> str:
    """One line a job, and under it one a row of its result."""
    lines = []
    for job in done:
        lines.append(f"{job['job']:>3}  exit {job['exit_code']}  {' '.join(job['overrides'])}")
        for row in job["rows"]:
            cells = [f"{name}={_short(row[name])}" for name in _COLUMNS if row.get(name) is not None]
            lines.append(f"       {'  '.join(cells)}")
    return "\n".join(lines) + "\n"


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
