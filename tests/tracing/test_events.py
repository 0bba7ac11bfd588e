"""The table of events: what workers record is what it declares, and files of other versions can be read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from tracing.runs import Run, made

from amusd.tracing.events import EVENTS, event_of_line
from amusd.tracing.timeline import read_events


def test_real_workers_record_the_fields_that_are_declared(real_run: Run, branching_run: Run, tmp_path: Path) -> None:
    """Reading a recorder raises for an unknown name or field, so that it is left to look for lacking ones."""
    every = [*real_run.target, *real_run.draft, *branching_run.target, *branching_run.draft]
    assert {event.name for event in every} >= {"worker", "sequence", "target_pass", "draft_step", "advance", "rollback"}
    directory = real_run.write(tmp_path)
    for role, recorded in (("target", real_run.target), ("draft", real_run.draft)):
        assert read_events(directory, role)[1:] == list(recorded)[1:]
        for line in (directory / "events" / f"{role}.jsonl").read_text().splitlines():
            record = json.loads(line)
            declared = {field.name for field in dataclasses.fields(EVENTS[record["name"]])}
            optional = {f.name for f in dataclasses.fields(EVENTS[record["name"]]) if f.default is None}
            assert declared - optional <= set(record) - {"name", "role"} <= declared


@pytest.mark.parametrize("lacking", ["name", "start_ns", "num_judged"])
def test_an_event_without_a_field_that_it_needs_is_none(lacking: str) -> None:
    line = {"name": "target_pass", "start_ns": 5, "end_ns": 7, "sequence_id": 1, **made("target_pass", 5, 7).fields}
    del line[lacking]
    with pytest.raises(ValueError, match="not an event"):
        event_of_line(line)
