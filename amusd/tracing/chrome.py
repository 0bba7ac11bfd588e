"""The timeline of one sequence as Chrome trace events, for Perfetto and chrome://tracing.

Two processes (target, draft) with three threads each: `sequence` (from the request to the end), `work` (what the worker
did, one thing at a time) and `messages` (a short slice for each message sent or received, so that its arrow has two
ends to hold on to).

References:
    Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from amusd.tracing.drafted import Fate, Step, judge_steps
from amusd.tracing.events import (
    DRAFT_WORK,
    TARGET_WORK,
    WAITS,
    DraftBack,
    DraftLost,
    DraftStep,
    Event,
    MessageEvent,
    Rollback,
    TargetGone,
    WholeSequence,
)  # fmt: skip
from amusd.tracing.messages import Flow
from amusd.tracing.timeline import Timeline

PROCESSES = {"target": 1, "draft": 2}
THREADS = {"sequence": 1, "work": 2, "messages": 3}
MESSAGE_NS = 2_000
"""Length of a message's slice, unless the next one comes sooner."""

_Json = dict[str, Any]


def chrome_trace(timeline: Timeline, about: _Json) -> _Json:
    """The trace as a JSON object. `timeline`: one sequence, on one clock; `about`: what else the metadata says."""
    origin_ns = min((event.start_ns for event in (*timeline.target, *timeline.draft)), default=0)
    steps = {step.event.start_ns: step for step in judge_steps(timeline.draft, timeline.target)}
    events: list[_Json] = []
    for role, own in (("target", timeline.target), ("draft", timeline.draft)):
        events += _names(role)
        events += _spans(role, own, steps)
        events += _message_slices(role, own)
        events += _instants(role, own)
    events += _arrows("target", "draft", timeline.to_draft, first_id=1)
    events += _arrows("draft", "target", timeline.to_target, first_id=1 + len(timeline.to_draft))
    return {
        "traceEvents": [_in_microseconds(event, origin_ns) for event in events],
        "displayTimeUnit": "ms",
        "metadata": {**about, "zero_ns": origin_ns},
    }


def _in_microseconds(event: _Json, origin_ns: int) -> _Json:
    times = {"ts": (event["ts"] - origin_ns) / 1000} if "ts" in event else {}
    return event | times | ({"dur": event["dur"] / 1000} if "dur" in event else {})


def _place(role: str, thread: str) -> _Json:
    return {"pid": PROCESSES[role], "tid": THREADS[thread], "cat": thread}


def _names(role: str) -> list[_Json]:
    process = {"ph": "M", "name": "process_name", "pid": PROCESSES[role], "args": {"name": role}}
    return [process] + [
        {"ph": "M", "name": "thread_name", "pid": PROCESSES[role], "tid": tid, "args": {"name": name}}
        for name, tid in THREADS.items()
    ]


def _spans(role: str, events: Iterable[Event], steps: dict[int, Step]) -> list[_Json]:
    found = []
    for event in sorted(events, key=lambda event: event.start_ns):
        if not isinstance(event, (WholeSequence, *TARGET_WORK, *DRAFT_WORK, *WAITS)):
            continue
        place = _place(role, "sequence" if isinstance(event, WholeSequence) else "work")
        span = place | {"ph": "X", "name": event.name, "ts": event.start_ns, "dur": event.duration_ns}
        step = steps.get(event.start_ns) if isinstance(event, DraftStep) else None
        fates = {fate.value: step.count(fate) for fate in Fate} if step else {}
        found.append(span | {"args": event.fields | fates})
    return found


def _message_slices(role: str, events: Sequence[Event]) -> list[_Json]:
    own = sorted((event for event in events if isinstance(event, MessageEvent)), key=lambda event: event.start_ns)
    ends = [min(event.start_ns + MESSAGE_NS, after.start_ns) for event, after in pairwise(own)]
    ends += [event.start_ns + MESSAGE_NS for event in own[-1:]]
    return [
        _place(role, "messages")
        | {
            "ph": "X",
            "name": f"{event.name} {event.message}",
            "ts": event.start_ns,
            "dur": end_ns - event.start_ns,
            "args": event.fields,
        }
        for event, end_ns in zip(own, ends, strict=True)
    ]


def _arrows(sender: str, receiver: str, flows: Sequence[Flow], *, first_id: int) -> list[_Json]:
    found: list[_Json] = []
    for number, flow in enumerate(flows, start=first_id):
        arrow = {"name": flow.message, "id": number}
        found.append(_place(sender, "messages") | arrow | {"ph": "s", "ts": flow.sent.start_ns})
        found.append(_place(receiver, "messages") | arrow | {"ph": "f", "bp": "e", "ts": flow.received.start_ns})
    return found


def _instants(role: str, events: Iterable[Event]) -> list[_Json]:
    return [
        _place(role, "work")
        | {"ph": "i", "s": "t", "name": event.name.replace("_", " "), "ts": event.start_ns, "args": event.fields}
        for event in events
        if isinstance(event, (Rollback, DraftLost, DraftBack, TargetGone))
    ]
