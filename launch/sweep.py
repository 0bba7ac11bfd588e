"""The measurements of a sweep's jobs in one place: `sweep.json`, and a table."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

from amusd.commands.tables import rows_table
from amusd.files import RESULT_FILE, read_json, write_json

from .run_directory import OVERRIDES_FILE, SUMMARY_FILE

_HIDDEN = (
    *("tokens_per_second_per_device", "p50_inter_token_ms", "p99_inter_token_ms", "target_idle_fraction"),
    *("draft_idle_fraction", "wasted_draft_fraction", "identical_to_autoregressive"),
)
_NO_RESULT = {"mode": "no result"}


def summarize(folder: Path) -> dict[str, Any]:
    """Write and return the document `sweep.json`."""
    jobs = sorted(map(_job, folder.rglob(OVERRIDES_FILE)), key=itemgetter("job"))
    values = [dict(override.split("=", 1) for override in job["overrides"]) for job in jobs]
    keys = [key for key in dict.fromkeys(chain(*values)) if len({one.get(key) for one in values}) > 1]
    for job, own in zip(jobs, values, strict=True):
        job["swept"] = {key: own.get(key, "") for key in keys}
    document = {"run_dir": str(folder), "swept_keys": keys, "jobs": jobs}
    write_json(folder / SUMMARY_FILE, document)
    return document


def summary_table(document: Mapping[str, Any]) -> str:
    """A line for each row of each job; a job without any has no result."""
    leading = {"job": "job"} | {key: f"swept.{key}" for key in document["swept_keys"]}
    rows = []
    for job in document["jobs"]:
        head = {"job": job["job"]} | {f"swept.{key}": value for key, value in job["swept"].items()}
        rows += [head | row for row in job["rows"] or [_NO_RESULT]]
    return rows_table(rows, _HIDDEN, leading)


def _job(file: Path) -> dict[str, Any]:
    directory, job = file.parent, read_json(file)
    result = read_json(directory / RESULT_FILE) or {}
    rows = result.get("rows", [])
    if "metrics" in result:  # of one answer
        rows = [{name: result[name] for name in ("mode", "policy", "drafter")} | result["metrics"]]
    return {**job, "run_dir": str(directory), "rows": rows}
