"""The measurements of a sweep's jobs in one place: `sweep.json`, `sweep.csv`, a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from amusd.commands.tables import COLUMNS, row_name
from amusd.console import table
from amusd.files import RESULT_FILE, csv_text, read_json, write_json, write_whole

from .run_directory import OVERRIDES_FILE, SUMMARY_FILE

CSV_FILE = "sweep.csv"
_SHOWN = (
    "tokens_per_second",
    "speedup_vs_autoregressive",
    "speedup_quartiles",
    "speedup_vs_best_synchronous",
    "acceptance_rate",
    "mean_acceptance_length",
)


def summarize(folder: Path) -> dict[str, Any]:
    """Write the tables of a sweep; return the document `sweep.json`."""
    jobs = [_job(path) for path in sorted(folder.iterdir(), key=_number) if (path / OVERRIDES_FILE).is_file()]
    values = [dict(override.split("=", 1) for override in job["overrides"]) for job in jobs]
    keys = [key for key in dict.fromkeys(chain(*values)) if len({one.get(key) for one in values}) > 1]
    for job, own in zip(jobs, values, strict=True):
        job["swept"] = {key: own.get(key, "") for key in keys}
    document = {"run_dir": str(folder), "swept_keys": keys, "jobs": jobs}
    write_json(folder / SUMMARY_FILE, document)
    rows = [
        {"job": job["job"]}
        | {f"swept.{key}": value for key, value in job["swept"].items()}
        | {name: value for name, value in row.items() if not isinstance(value, list | dict)}
        for job in jobs
        for row in job["rows"]
    ]
    write_whole(folder / CSV_FILE, csv_text(rows))
    return document


def summary_table(document: Mapping[str, Any]) -> str:
    """A line for each row of each job; a job without any has no result."""
    shown = [column for column in COLUMNS if column.name in _SHOWN]
    header = ("job", *document["swept_keys"], "mode", *(column.heading for column in shown))

    def lines() -> Iterator[tuple[str, ...]]:
        for job in document["jobs"]:
            head = (str(job["job"]), *job["swept"].values())
            for row in job["rows"]:
                yield (*head, row_name(row), *(column.text(row) for column in shown))
            if not job["rows"]:
                yield (*head, "no result", *("" for _ in shown))

    return table(header, list(lines()))


def _job(directory: Path) -> dict[str, Any]:
    result = read_json(directory / RESULT_FILE) or {}
    rows = result.get("rows", [])
    if "metrics" in result:  # of one answer
        rows = [{name: result[name] for name in ("mode", "policy", "drafter")} | result["metrics"]]
    overrides = read_json(directory / OVERRIDES_FILE)
    return {"job": _number(directory), "overrides": overrides, "run_dir": str(directory), "rows": rows}


def _number(directory: Path) -> int:
    return int(directory.name) if directory.name.isdecimal() else -1
