"""The trace file of a real run: in the Trace Event Format, and every arrow from a sending to its receiving."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import pytest
from tracing.runs import Run, made, named

from amusd.tracing.chrome import THREADS, chrome_trace
from amusd.tracing.timeline import Timeline

ROUNDING = 0.002
"""Microseconds that floating point may be off by."""


@pytest.fixture(params=[2, 3], ids=["synchronous", "asynchronous"])
def part(request: pytest.FixtureRequest, real_run: Run) -> Timeline:
    return real_run.timeline.only(request.param)


COMMON = {"ph": str, "name": str, "pid": int}
ON_A_THREAD = {"tid": int, "cat": str, "ts": (int, float)}
REQUIRED: dict[str, dict[str, Any]] = {
    "M": COMMON | {"args": dict},
    "X": COMMON | ON_A_THREAD | {"dur": (int, float), "args": dict},
    "i": COMMON | ON_A_THREAD | {"s": str, "args": dict},
    "s": COMMON | ON_A_THREAD | {"id": int},
    "f": COMMON | ON_A_THREAD | {"id": int, "bp": str},
}
"""The phases that are written, each with what an event of it has to have."""
OPTIONAL: dict[str, dict[str, Any]] = {"M": {"tid": int}, "X": {"cname": str}}
RESERVED_COLOURS = {"good", "bad", "terrible", "white"}
"""Those of the viewers' reserved names that are used; another name is an error in chrome://tracing."""


def violations(trace: dict[str, Any]) -> list[str]:
    """What the Trace Event Format, or a viewer, would object to."""
    if set(trace) - {"traceEvents", "displayTimeUnit", "metadata"} or trace["displayTimeUnit"] not in ("ms", "ns"):
        return ["the object around the events"]
    found = [f"{problem}: {event}" for event in trace["traceEvents"] for problem in (_form(event) or _meaning(event))]
    return found or _together(trace["traceEvents"])


def _form(event: dict[str, Any]) -> list[str]:
    """Keys and types."""
    phase = event.get("ph")
    if phase not in REQUIRED:
        return [f"phase {phase}"]
    known = REQUIRED[phase] | OPTIONAL.get(phase, {})
    lacking = [f"no {key}" for key in REQUIRED[phase] if key not in event]
    unknown = [f"unknown {key}" for key in event if key not in known]
    return (
        lacking
        + unknown
        + [f"type of {key}" for key in event if key in known and type(event[key]) not in _types(known[key])]
    )


def _types(given: Any) -> tuple[type, ...]:
    return given if isinstance(given, tuple) else (given,)


def _meaning(event: dict[str, Any]) -> list[str]:
    """Values of one event."""
    allowed = {
        "M": event["name"] in ("process_name", "thread_name") and isinstance(event.get("args", {}).get("name"), str),
        "i": event.get("s") in ("g", "p", "t"),
        "f": event.get("bp") == "e",
    }
    found = [] if allowed.get(event["ph"], True) else ["value"]
    times = [event[key] for key in ("ts", "dur") if key in event]
    found += [] if all(math.isfinite(time) and time >= 0 for time in times) else ["time"]
    return found + ([] if event.get("cname", "good") in RESERVED_COLOURS else ["colour"])


def _together(events: list[dict[str, Any]]) -> list[str]:
    """What holds between events: named processes and threads, slices that nest, whole arrows."""
    found = []
    named = Counter((e["name"], e["pid"], e.get("tid")) for e in events if e["ph"] == "M")
    found += [f"{name} is named {count} times" for name, count in named.items() if count > 1]
    tracks = {(e["pid"], e["tid"]) for e in events if e["ph"] != "M"}
    found += [f"process {pid} has no name" for pid, _ in tracks if ("process_name", pid, None) not in named]
    found += [f"thread {pid}, {tid} has no name" for pid, tid in tracks if ("thread_name", pid, tid) not in named]
    for track in tracks:
        slices = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == track]
        if any(after[0] < before[0] or after[0] + ROUNDING < before[1] for before, after in pairwise(slices)):
            found.append(f"slices of {track} go back or overlap")
    ends: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"]].append(event)
    for number, both in ends.items():
        if [e["ph"] for e in both] != ["s", "f"] or len({(e["name"], e["cat"]) for e in both}) > 1:
            found.append(f"arrow {number} is not one start and then one end of the same name")
        elif both[0]["ts"] > both[1]["ts"]:
            found.append(f"arrow {number} goes back in time")
    return found


def of_thread(trace: dict[str, Any], thread: str, pid: int) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if (e.get("pid"), e.get("tid")) == (pid, THREADS[thread])]


def traced(part: Timeline) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(json.dumps(chrome_trace(part, {"sequence_id": 3})))
    return trace


@pytest.mark.parametrize("sequence_id", [1, 2, 3, 4])
def test_every_event_is_in_the_trace_event_format(real_run: Run, sequence_id: int) -> None:
    assert violations(traced(real_run.timeline.only(sequence_id))) == []


@pytest.mark.parametrize("sequence_id", [1, 2])
def test_so_it_is_where_the_draft_branches(branching_run: Run, sequence_id: int) -> None:
    assert violations(traced(branching_run.timeline.only(sequence_id))) == []


def spoiled(trace: dict[str, Any], phase: str, **changes: Any) -> dict[str, Any]:
    """The trace with other values (None: without the key) in the second event of a phase."""
    found = [event for event in trace["traceEvents"] if event["ph"] == phase][1]
    for key, value in changes.items():
        found.pop(key) if value is None else found.update({key: value})
    return trace


@pytest.mark.parametrize(
    ("phase", "changes"),
    [
        ("X", {"ph": "Q"}),
        ("X", {"dur": -1.0}),
        ("X", {"dur": None}),
        ("X", {"dur": 1e9}),
        ("X", {"ts": -1.0}),
        ("X", {"ts": math.nan}),
        ("X", {"ts": "12"}),
        ("X", {"ts": 1e9}),
        ("X", {"pid": 9}),
        ("X", {"tid": 9}),
        ("X", {"cname": "green"}),
        ("X", {"colour": "good"}),
        ("M", {"args": {}}),
        ("M", {"name": "process_nam"}),
        ("M", {"tid": 2}),
        ("i", {"s": "x"}),
        ("i", {"s": None}),
        ("s", {"id": None}),
        ("s", {"id": 999_999}),
        ("s", {"id": 1}),
        ("s", {"cat": "work"}),
        ("s", {"ts": 1e9}),
        ("f", {"id": 999_999}),
        ("f", {"name": "other"}),
        ("f", {"bp": None}),
        ("f", {"ts": 0.0}),
    ],
)
def test_a_spoiled_trace_is_found(real_run: Run, phase: str, changes: dict[str, Any]) -> None:
    assert violations(spoiled(traced(real_run.timeline.only(3)), phase, **changes))


def test_two_named_processes_with_named_threads_and_the_clock(part: Timeline) -> None:
    trace = traced(part)
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["target", "draft"]
    assert sum(e["name"] == "thread_name" for e in trace["traceEvents"]) == 2 * len(THREADS)
    assert trace["metadata"]["sequence_id"] == 3


@pytest.mark.parametrize("pid", [1, 2])
@pytest.mark.parametrize("thread", list(THREADS))
def test_spans_of_a_thread_are_in_order_and_do_not_overlap(part: Timeline, thread: str, pid: int) -> None:
    spans = [e for e in of_thread(traced(part), thread, pid) if e["ph"] == "X"]
    assert spans
    assert all(span["ts"] >= 0 and span["dur"] >= 0 for span in spans)
    for before, after in pairwise(spans):
        assert before["ts"] + before["dur"] <= after["ts"] + ROUNDING


def test_every_span_of_the_workers_is_there(part: Timeline) -> None:
    trace = traced(part)
    names = [e["name"] for e in trace["traceEvents"] if e["ph"] == "X"]
    assert names.count("target_pass") == len(named(part.target, "target_pass"))
    assert names.count("draft_step") == len(named(part.draft, "draft_step"))
    assert names.count("sequence") == 2


def test_every_arrow_starts_and_ends_in_a_slice_and_goes_forward(part: Timeline) -> None:
    trace = traced(part)
    starts = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "s"}
    ends = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "f"}
    assert set(starts) == set(ends)
    assert len(starts) == len(part.to_draft) + len(part.to_target) > 20
    slices = {(e["pid"], e["tid"], e["ts"]): e["name"] for e in trace["traceEvents"] if e["ph"] == "X"}
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"]
        assert start["name"] == end["name"]
        assert slices[start["pid"], start["tid"], start["ts"]] == f"send {start['name']}"
        assert slices[end["pid"], end["tid"], end["ts"]] == f"receive {end['name']}"


def test_rollbacks_and_late_candidates_are_marked(real_run: Run) -> None:
    part = real_run.timeline.only(3)
    marks = [e["name"] for e in traced(part)["traceEvents"] if e["ph"] == "i"]
    assert marks.count("rolled back") == len(named(part.draft, "rollback")) > 0
    late = sum(e.num_accepted > e.num_candidates for e in named(part.target, "target_pass"))
    assert late == real_run.answers[2].metrics.num_late_accepted
    assert marks.count("late candidate accepted") == late > 0


def test_a_lost_draft_is_marked() -> None:
    part = Timeline.of([made("target_prefill", 0, 10, 1), made("draft_lost", 20, 20, 1, reason="gone")], [])
    marks = [(e["name"], e["ts"]) for e in traced(part)["traceEvents"] if e["ph"] == "i"]
    assert marks == [("draft lost", 0.02)]


def test_colours_say_what_became_of_the_tokens(real_run: Run) -> None:
    events = traced(real_run.timeline.only(3))["traceEvents"]
    for event in events:
        if event["name"] == "target_pass" and event["args"]["num_judged"]:
            accepted, judged = event["args"]["num_accepted"], event["args"]["num_judged"]
            assert event["cname"] == ("good" if accepted == judged else "bad" if accepted else "terrible")
    steps = [e["args"] for e in events if e["name"] == "draft_step"]
    assert sum(step["accepted"] for step in steps) == real_run.answers[2].metrics.num_accepted
    assert sum(step["accepted"] + step["overtaken"] + step["wasted"] for step in steps) == sum(
        step["num_tokens"] for step in steps
    )
