"""The trace file of a real run: well-formed, nothing at the same time on one thread, every arrow with two ends."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from tracing.runs import Run, named

from amusd.tracing.chrome import THREADS, chrome_trace
from amusd.tracing.recorder import Event
from amusd.tracing.timeline import Timeline

ROUNDING = 0.002
"""Microseconds that floating point may be off by."""


@pytest.fixture(params=[2, 3], ids=["synchronous", "asynchronous"])
def part(request: pytest.FixtureRequest, real_run: Run) -> Timeline:
    return real_run.timeline.only(request.param)


def of_thread(trace: dict[str, Any], thread: str, pid: int) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if (e.get("pid"), e.get("tid")) == (pid, THREADS[thread])]


def traced(part: Timeline) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(json.dumps(chrome_trace(part, {"sequence_id": 3})))
    return trace


def test_two_named_processes_with_named_threads_and_the_clock(part: Timeline) -> None:
    trace = traced(part)
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["target", "draft"]
    assert sum(e["name"] == "thread_name" for e in trace["traceEvents"]) == 2 * len(THREADS)
    assert trace["metadata"]["clock"].startswith("one host")
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
    late = sum(e.fields["num_accepted"] > e.fields["num_candidates"] for e in named(part.target, "target_pass"))
    assert late == real_run.answers[2].metrics.num_late_accepted
    assert marks.count("late candidate accepted") == late > 0


def test_a_lost_draft_is_marked() -> None:
    part = Timeline.of([Event("target_prefill", 0, 10, 1, {}), Event("draft_lost", 20, 20, 1, {"reason": "gone"})], [])
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
