"""What a sweep has measured, in one place: `sweep.json`, `sweep.csv`, `report.html` and the table on the terminal."""

from __future__ import annotations

import csv
import datetime as dt
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amusd.console import table
from amusd.reporting.columns import COLUMNS, row_name
from amusd.reporting.sweep import sweep_page

from .run_directory import write_whole
from .sweep_plan import SUMMARY_FILE, Plan, read_result

CSV_FILE = "sweep.csv"
REPORT_FILE = "report.html"
_SHOWN = (
    "tokens_per_second",
    "speedup_vs_autoregressive",
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
    """Of the first job that has a result."""

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
        records = [
            {"job": job["job"], "exit_code": job["exit_code"]}
            | {f"swept.{key}": value for key, value in job["swept"].items()}
            | {name: value for name, value in row.items() if isinstance(value, (str, int, float, type(None)))}
            for job in self.jobs
            for row in job["rows"]
        ]
        text = io.StringIO()
        writer = csv.DictWriter(text, list(dict.fromkeys(name for record in records for name in record)))
        writer.writeheader()
        writer.writerows(records)
        return text.getvalue()


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
    """Write `sweep.json`; with `complete` also the table for spreadsheets and the page."""
    write_whole(summary.folder / SUMMARY_FILE, json.dumps(summary.document(), indent=1) + "\n")
    if complete:
        write_whole(summary.folder / CSV_FILE, summary.csv())
        page = sweep_page(
            command=summary.plan.command,
            arguments=summary.plan.arguments,
            swept_keys=summary.plan.swept_keys,
            jobs=summary.jobs,
            config=summary.plan.jobs[0].config,
            environment=summary.environment,
            date=dt.datetime.now().astimezone().date().isoformat(),
        )
        write_whole(summary.folder / REPORT_FILE, page)


def _rows_of(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a comparison; of an answer, its figures; nothing when the job did not come that far."""
    if "metrics" in result:
        named = {name: result[name] for name in ("mode", "policy", "drafter")}
        return [{**named, **result["metrics"]}]
    rows: list[dict[str, Any]] = result.get("rows", [])
    return rows


def _ending(exit_code: int | None) -> str:
    return "not run" if exit_code is None else f"exit {exit_code}"
