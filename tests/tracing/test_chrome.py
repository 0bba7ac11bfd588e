"""The trace file of a run: in the Trace Event Format, and every arrow from a sending to its receiving."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from tracing.runs import SCHEDULES, made, simulated

from amusd.commands.trace import THREADS, chrome_trace
from amusd.tracing.timeline import Timeline

ON_A_THREAD = {"ph", "name", "pid", "tid", "cat", "ts"}
KEYS = {
    "M": {"ph", "name", "pid", "args"},
    "X": ON_A_THREAD | {"dur", "args"},
    "i": ON_A_THREAD | {"s", "args"},
    "s": ON_A_THREAD | {"id"},
    "f": ON_A_THREAD | {"id", "bp"},
}
"""The phases that are written, each with what the format asks of an event of it."""


@pytest.fixture(params=SCHEDULES)
def part(request: pytest.FixtureRequest) -> Timeline:
    return simulated(request.param)[1]


def traced(part: Timeline) -> list[dict[str, Any]]:
    trace = json.loads(json.dumps(chrome_trace(part, {"sequence_id": 3})))
    assert (trace["displayTimeUnit"], trace["metadata"]["sequence_id"]) == ("ms", 3)
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


def test_every_event_is_in_the_trace_event_format(part: Timeline) -> None:
    events = traced(part)
    for event in events:
        assert KEYS[event["ph"]] <= set(event) <= KEYS[event["ph"]] | {"tid"}, event
    names = [(event["name"], event["pid"], event.get("tid")) for event in events if event["ph"] == "M"]
    assert len({*names}) == len(names) == 2 * (1 + len(THREADS))
    for track in {(event["pid"], event["tid"]) for event in events if event["ph"] != "M"}:
        assert ("thread_name", *track) in names
        slices = [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == track]
        assert all(0 <= before["ts"] + before["dur"] <= after["ts"] + 0.002 for before, after in pairwise(slices))


def test_every_arrow_starts_and_ends_in_a_slice_and_goes_forward(part: Timeline) -> None:
    events = traced(part)
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert set(starts) == set(ends)
    assert len(starts) == len(part.to_draft) + len(part.to_target)
    assert bool(starts) == bool(part.draft)
    slices = {(event["pid"], event["tid"], event["ts"], event["name"]) for event in events if event["ph"] == "X"}
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"]
        assert (start["pid"], start["tid"], start["ts"], f"send {start['name']}") in slices
        assert (end["pid"], end["tid"], end["ts"], f"receive {end['name']}") in slices


def test_a_lost_draft_is_marked() -> None:
    part = Timeline([made("target_prefill", 0, 10, 1), made("draft_lost", 20, 20, 1, reason="gone")], [])
    marks = [(event["name"], event["ts"]) for event in traced(part) if event["ph"] == "i"]
    assert marks == [("draft lost", 0.02)]
