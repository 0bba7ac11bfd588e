"""What `amusd trace` needs to know of a run directory: the page to make again, and the jobs of a sweep."""

from __future__ import annotations

import json
from pathlib import Path

from amusd.reporting.comparison import REPORT_FILE, write_comparison_page

from .run_directory import EVENTS_FOLDER, RESULT_FILE, SUMMARY_FILE, read_config


def refresh_report(directory: Path) -> bool:
    """Make the page again if the run has one. Returns whether it has."""
    if not (directory / REPORT_FILE).is_file():
        return False
    result = json.loads((directory / RESULT_FILE).read_text(encoding="utf-8"))
    write_comparison_page(directory, read_config(directory), result)
    return True


def traces_of_sweep(directory: Path) -> list[str]:
    """The commands that trace the jobs of a sweep, with what tells these apart; none where it is no sweep."""
    path = directory / SUMMARY_FILE
    if not path.is_file():
        return []
    jobs = json.loads(path.read_text(encoding="utf-8"))["jobs"]
    return [
        f"amusd trace {directory / str(job['job'])}  # "
        + " ".join(f"{key}={job['swept'][key]}" for key in job["swept"])
        for job in jobs
        if (directory / str(job["job"]) / EVENTS_FOLDER).is_dir()
    ]
