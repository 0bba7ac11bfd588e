"""The page of a finished comparison, made again when something that it shows has been added to its directory."""

from __future__ import annotations

import json
from pathlib import Path

from amusd.reporting.comparison import REPORT_FILE, write_comparison_page

from .run_directory import RESULT_FILE, read_config


def refresh_report(directory: Path) -> bool:
    """Make the page again if the run has one. Returns whether it has."""
    if not (directory / REPORT_FILE).is_file():
        return False
    result = json.loads((directory / RESULT_FILE).read_text(encoding="utf-8"))
    write_comparison_page(directory, read_config(directory), result)
    return True
