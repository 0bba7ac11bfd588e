"""`amusd trace` on real run directories, and on folders that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from simulation.builders import PLAIN, chain, synchronous, write_run
from tracing.runs import MACHINE

from amusd.commands.trace import run
from amusd.errors import ConfigError


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    write_run(tmp_path, MACHINE, PLAIN, synchronous(4), chain(2), synchronous(2))
    return tmp_path


def test_the_file_the_picture_and_the_figures_of_a_sequence(run_directory: Path, capsys: Any) -> None:
    assert run(run_directory) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("sequence 2001: asynchronous (chain), drafter simulated\n")
    assert "target at work " in printed
    assert " candidates accepted" in printed
    assert "asynchronous (chain), drafter simulated:\n" in printed
    assert "\n  2 candidates: " in printed
    assert "\n  draft steps by rows: 1: " in printed
    assert " passes began without a candidate that was sent within the " in printed
    assert json.loads((run_directory / "trace.json").read_text())["metadata"]["sequence_id"] == 2001
    svg = (run_directory / "timeline.svg").read_text()
    assert "synchronous, blocks of 2" in svg
    assert "asynchronous (chain)" in svg
    assert (run_directory / "timeline.png").is_file()


def test_what_cannot_be_traced_is_said_in_one_line(run_directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"^sequence=9: no such sequence; this run has sequence=1 to 3001$"):
        run(run_directory, "sequence=9")
    (empty := run_directory / "empty").mkdir()
    with pytest.raises(ConfigError, match="hold no answer"):
        run(empty)
    (empty / "events").mkdir()
    (empty / "events" / "target.jsonl").write_text('{"name": "target_pass"}\n')
    with pytest.raises(ConfigError, match="cannot be read"):
        run(empty)
