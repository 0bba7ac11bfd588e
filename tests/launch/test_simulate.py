"""`amusd simulate` as typed: a table or a document, a run directory, and no other process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.main import main

GIVEN = ["simulate", "accept=0.8", "verify_ms=25", "draft_ms=2.5", "delay_ms=0.05"]
SMALL = ["simulate.num_tokens=30", "simulate.synchronous_lengths=[2]"]


def test_the_result_is_printed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert main([*GIVEN, *SMALL, f"run_dir={folder}", "output=json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert printed["run_dir"] == str(folder)
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "environment.json", "events", "result.json"}
    assert {path.name for path in (folder / "events").iterdir()} == {"target.jsonl", "draft.jsonl"}
    assert main(["simulate", *SMALL, f"calibration={folder}", f"run_dir={tmp_path / 'again'}"]) == 0
    assert "chain, waits for 2" in capsys.readouterr().out


def test_nothing_is_left_behind_by_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "verify_ms=2", f"run_dir={tmp_path / 'run'}"]) == 2
    assert list(tmp_path.iterdir()) == []
    assert "accept: required to simulate" in capsys.readouterr().err
