"""What `amusd trace` needs to know of a run directory: the page to make again, and the jobs of a sweep."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from amusd.errors import ConfigError
from amusd.reporting.comparison import REPORT_FILE, write_comparison_page

from .run_directory import EVENTS_FOLDER, RESULT_FILE, SUMMARY_FILE, read_config

_DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError)
"""What reading a file raises that is not what a run has written."""


def refresh_report(directory: Path) -> bool:
    """Make the page again if the run has one. Returns whether it has. Raises `ConfigError` for a damaged result."""
    if not (directory / REPORT_FILE).is_file():
        return False
    try:
        result = json.loads((directory / RESULT_FILE).read_text(encoding="utf-8"))
        config = read_config(directory)
        write_comparison_page(directory, config, result)
    except _DAMAGED as error:
        raise ConfigError(f"{directory / REPORT_FILE}: cannot be made again ({_said(error)})") from None
    return True


def traces_of_sweep(directory: Path) -> list[str]:
    """The commands that trace the jobs of a sweep, with what tells these apart; none where it is no sweep.

    Raises `ConfigError` for a damaged summary.
    """
    path = directory / SUMMARY_FILE
    if not path.is_file():
        return []
    try:
        jobs = json.loads(path.read_text(encoding="utf-8"))["jobs"]
        return [
            f"amusd trace {directory / str(job['job'])}  # "
            + " ".join(f"{key}={job['swept'][key]}" for key in job["swept"])
            for job in jobs
            if (directory / str(job["job"]) / EVENTS_FOLDER).is_dir()
        ]
    except _DAMAGED as error:
        raise ConfigError(f"{path}: cannot be read ({_said(error)})") from None


def _said(error: Exception) -> str:
    """The error in one line, with its kind: some say no more than a key."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
