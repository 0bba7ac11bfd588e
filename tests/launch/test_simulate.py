"""`amusd simulate` as typed: a table or a document, a run directory, and no other process."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from launch.main import main

GIVEN = ["simulate", "accept=0.8", "verify_ms=25", "draft_ms=2.5", "delay_ms=0.05"]
SMALL = ["simulate.num_answers=1", "simulate.num_tokens=60", "simulate.synchronous_lengths=[2,4]"]


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


def test_the_map_is_a_picture_with_the_runs_that_were_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*GIVEN, *SMALL, f"run_dir={tmp_path / 'first'}"]) == 0
    places = ["simulate.grid=true", "simulate.grid_accepts=[0.5,0.9]", "simulate.grid_ratios=[8]"]
    folder = tmp_path / "map"
    assert main([*GIVEN, *SMALL, *places, f"simulate.points=[{tmp_path / 'first'}]", f"run_dir={folder}"]) == 0
    assert f"{folder / 'map.svg'}: open it in a browser" in capsys.readouterr().err
    picture = ET.parse(folder / "map.svg").getroot()
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    groups = [element for element in picture.iter() if element.get("class", "").startswith("cell ")]
    assert [group.get("class") for group in groups] == [f"cell {cell['winner']}" for cell in result["grid"]]
    assert sum(element.get("class") == "point" for element in picture.iter()) == len(result["points"]) == 1


def test_nothing_is_left_behind_by_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "accept=0.8", f"run_dir={tmp_path / 'run'}"]) == 2
    assert main(["simulate", "-m", "accept=0.8,0.9"]) == 2
    assert list(tmp_path.iterdir()) == []
    assert "amusd simulate` looks at one configuration" in capsys.readouterr().err
