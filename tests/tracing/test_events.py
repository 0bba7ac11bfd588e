"""The table of events: what workers record is what it declares, and files of other versions can be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tracing.runs import MACHINE, SCHEDULES, made, simulated

from amusd.tracing.timeline import read_events


def test_what_real_workers_record_is_read_back(tmp_path: Path) -> None:
    outcome, folder = simulated("branching")[0], tmp_path / "events"
    folder.mkdir()
    MACHINE.run(SCHEDULES["branching"], folder)
    for role, recorded in outcome.timeline._asdict().items():
        found = read_events(tmp_path, role)
        assert found == list(recorded[: len(found)])
        assert len({event.name for event in found}) > 4


@pytest.mark.parametrize("lacking", ["name", "start_ns", "num_judged"])
def test_an_event_without_a_field_that_it_needs_is_none(lacking: str, tmp_path: Path) -> None:
    line = {"name": "target_pass", "start_ns": 5, "end_ns": 7, "sequence_id": 1, **made("target_pass", 5, 7).fields}
    del line[lacking]
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "target.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=lacking):
        read_events(tmp_path, "target")
