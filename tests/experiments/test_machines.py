"""The table of machines: a row is the median of three runs, and the README shows what the file holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from amusd.errors import ConfigError
from experiments.machines import run as machines


def result(ratio: float, **summary: Any) -> dict[str, Any]:
    figures = {"autoregressive": 10.0, "synchronous": 20.0, "asynchronous": 20 * ratio, "acceptance_length": 2.5}
    named = {"machine": "A CPU, 2 cores", "pair": "embedded, embedded", "commit": "c0ffee00" * 5}
    same = {"num_prompts": 16, "num_identical": 15}
    return {
        "summary": {**named, **figures, "ratio": ratio, **summary},
        "environment": {"date": "2026-11-28"},
        "rows": [{"identical_to_autoregressive": same}, {"identical_to_autoregressive": None}],
    }


def test_a_row_is_the_median_of_the_runs_and_stands_in_the_table(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"Rules\n\n{machines.MARK}\n\nan older table\n")
    machines.add_row(tmp_path, [result(1.3), result(1.1), result(1.2)], ["target.model=/secret/big"])
    machines.write_table(tmp_path)
    (row,) = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert (row["ratio"], row["asynchronous"], row["keys"][-1]) == (1.2, 24.0, "target.model=big")
    line = "| A CPU, 2 cores | embedded, embedded | 10.0 | 20.0 | 24.0 | 1.20 | 2.50 | 45/48 | 2026-11-28, c0ffee00 |"
    header, rule = machines.table_of([]).split("\n")
    assert header.count("|") == rule.count("|") == line.count("|")
    assert (tmp_path / "README.md").read_text() == f"Rules\n\n{machines.MARK}\n\n{header}\n{rule}\n{line}\n"


@pytest.mark.parametrize("odd", [{"commit": "+changes"}, None], ids=["another commit", "a mode is missing"])
def test_runs_that_are_no_row_are_refused(tmp_path: Path, odd: dict[str, str] | None) -> None:
    last = result(1.0, **odd) if odd else {**result(1.0), "summary": {}}
    with pytest.raises(ConfigError, match=r"^no row: "):
        machines.add_row(tmp_path, [result(1.0), result(1.0), last], [])
    assert not (tmp_path / "rows.jsonl").exists()


def test_the_table_is_the_one_of_the_rows() -> None:
    rows = [json.loads(line) for line in (machines.FOLDER / "rows.jsonl").read_text().splitlines()]
    assert (machines.FOLDER / "README.md").read_text().partition(machines.MARK)[2].strip() == machines.table_of(rows)
