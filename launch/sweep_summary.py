"""The measurements of a sweep in one place: `sweep.json`, `sweep.csv`, all answers and a table."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amusd.commands.tables import COLUMNS, row_name
from amusd.console import table
from amusd.files import ANSWERS_FILE, PROMPTS_FILE, csv_text, json_lines, write_whole

from .run_directory import SUMMARY_FILE
from .sweep_plan import Plan, read_result

CSV_FILE = "sweep.csv"
_SHOWN = (
    "tokens_per_second",
    "speedup_vs_autoregressive",
    "speedup_quartiles",
    "speedup_vs_best_synchronous",
    "acceptance_rate",
    "mean_acceptance_length",
)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A sweep so far. `jobs` holds a dictionary for each of its jobs, as `sweep.json` shows it."""

    plan: Plan
    folder: Path
    jobs: tuple[dict[str, Any], ...]
    environment: Mapping[str, Any]
    """The environment of the first job that has a result."""

    def document(self) -> dict[str, Any]:
        """`sweep.json`."""
        return {
            "command": self.plan.command,
            "arguments": list(self.plan.arguments),
            "swept_keys": list(self.plan.swept_keys),
            "run_dir": str(self.folder),
            "jobs": list(self.jobs),
        }

    def table(self) -> str:
        """A line for each row of each job; jobs without any say how they ended."""
        shown = [column for column in COLUMNS if column.name in _SHOWN]
        header = ("job", *self.plan.swept_keys, "mode", *(column.heading for column in shown))
        lines: list[tuple[str, ...]] = []
        for job in self.jobs:
            head = (str(job["job"]), *job["swept"].values())
            lines += [(*head, row_name(row), *(column.text(row) for column in shown)) for row in job["rows"]]
            if not job["rows"]:
                lines.append((*head, _ending(job["exit_code"]), *("" for _ in shown)))
        return table(header, lines)

    def csv(self) -> str:
        """A line for each row: its job, the values of the swept keys, and every column that holds single values."""
        return csv_text(
            [
                {"job": job["job"], "exit_code": job["exit_code"]}
                | _swept(job)
                | {name: value for name, value in row.items() if isinstance(value, (str, int, float, type(None)))}
                for job in self.jobs
                for row in job["rows"]
            ]
        )

    def answers(self) -> list[dict[str, Any]]:
        """Every answer of every job, as the `answers.jsonl` of the jobs have them."""
        return [{"job": job["job"], **json.loads(line)} for job in self.jobs for line in self._lines(job, ANSWERS_FILE)]

    def prompts(self) -> list[dict[str, Any]]:
        """The time and counts of every answer, as the `prompts.csv` of the jobs have them."""
        return [
            {"job": job["job"], **_swept(job), **row}
            for job in self.jobs
            for row in csv.DictReader(self._lines(job, PROMPTS_FILE))
        ]

    def _lines(self, job: Mapping[str, Any], name: str) -> list[str]:
        path = self.folder / str(job["job"]) / name
        return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def summarize(plan: Plan, folder: Path, exit_codes: Mapping[int, int]) -> Summary:
    """Collect the results of the jobs. `exit_codes`: of those that have ended, by number."""
    jobs, environment = [], None
    for job in plan.jobs:
        result = read_result(folder / str(job.number))
        environment = environment or result.get("environment")
        jobs.append(
            {
                "job": job.number,
                "overrides": list(job.overrides),
                "swept": job.swept,
                "exit_code": exit_codes.get(job.number),
                "run_dir": str(folder / str(job.number)),
                "rows": _rows_of(result),
            }
        )
    return Summary(plan=plan, folder=folder, jobs=tuple(jobs), environment=environment or {})


def write_summary(summary: Summary, *, complete: bool) -> None:
    """Write `sweep.json`; with `complete` also the tables for spreadsheets, and the answers."""
    write_whole(summary.folder / SUMMARY_FILE, json.dumps(summary.document(), indent=1) + "\n")
    if complete:
        write_whole(summary.folder / CSV_FILE, summary.csv())
        if answers := summary.answers():
            write_whole(summary.folder / ANSWERS_FILE, json_lines(answers))
            write_whole(summary.folder / PROMPTS_FILE, csv_text(summary.prompts()))


def _rows_of(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a comparison; of an answer, its figures; nothing when the job did not come that far."""
    if "metrics" in result:
        named = {name: result[name] for name in ("mode", "policy", "drafter")}
        return [{**named, **result["metrics"]}]
    rows: list[dict[str, Any]] = result.get("rows", [])
    return rows


def _swept(job: Mapping[str, Any]) -> dict[str, str]:
    return {f"swept.{key}": value for key, value in job["swept"].items()}


def _ending(exit_code: int | None) -> str:
    return "not run" if exit_code is None else f"exit {exit_code}"
