"""The timeline of one sequence as Chrome trace events, for Perfetto and chrome://tracing.

Target and draft are processes with the threads `sequence`, `work` and `messages`. A message is a short slice, so that
its arrow has two ends.

References: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from amusd.tracing.events import DRAFT_WORK, TARGET_WORK, WAITS, DraftStep, Event, MessageEvent
from amusd.tracing.timeline import Fate, Timeline

PROCESSES = {"target": 1, "draft": 2}
THREADS = {"sequence": 1, "work": 2, "messages": 3}
MARKS = ("rollback", "draft_lost", "draft_back", "target_gone")
MESSAGE_NS = 2_000

_Json = dict[str, Any]


def chrome_trace(timeline: Timeline, about: _Json) -> _Json:
    """The trace as a JSON object. `timeline`: one sequence, on one clock; `about`: further metadata."""
    origin_ns = min((event.start_ns for event in (*timeline.target, *timeline.draft)), default=0)
    fates = {step.start_ns: fates for step, fates in timeline.steps()}
    found = []
    for role, events in (("target", timeline.target), ("draft", timeline.draft)):
        own = sorted(events, key=lambda event: event.start_ns)
        found += [*_names(role), *_work(role, own, fates)]
        found += _messages(role, [event for event in own if isinstance(event, MessageEvent)])
    flows = [("target", "draft", flow) for flow in timeline.to_draft]
    flows += [("draft", "target", flow) for flow in timeline.to_target]
    for number, (sender, receiver, (sent, received)) in enumerate(flows, start=1):
        found.append(_at(sender, "messages", "s", sent.message, sent, id=number))
        found.append(_at(receiver, "messages", "f", sent.message, received, id=number, bp="e"))
    for event in found:
        if "ts" in event:
            event["ts"] = (event["ts"] - origin_ns) / 1000
    return {"traceEvents": found, "displayTimeUnit": "ms", "metadata": {**about, "zero_ns": origin_ns}}


def _names(role: str) -> Iterator[_Json]:
    """The process of a worker and its threads."""
    process = {"ph": "M", "pid": PROCESSES[role]}
    yield {**process, "name": "process_name", "args": {"name": role}}
    for name, tid in THREADS.items():
        yield {**process, "name": "thread_name", "tid": tid, "args": {"name": name}}


def _work(role: str, events: Sequence[Event], fates: Mapping[int, Mapping[Fate, int]]) -> Iterator[_Json]:
    """Spans, and marks of what happened at once. `fates`: of the tokens of draft steps, by their start."""
    for event in events:
        own = fates.get(event.start_ns, {}) if isinstance(event, DraftStep) else {}
        if event.name in ("sequence", *TARGET_WORK, *DRAFT_WORK, *WAITS):
            thread = "sequence" if event.name == "sequence" else "work"
            microseconds = event.duration_ns / 1000
            yield _at(role, thread, "X", event.name, event, dur=microseconds, args={**event.fields, **own})
        if event.name in MARKS:
            yield _at(role, "work", "i", event.name.replace("_", " "), event, s="t", args=event.fields)


def _messages(role: str, events: Sequence[MessageEvent]) -> Iterator[_Json]:
    for event, after in zip_longest(events, events[1:]):
        ns = MESSAGE_NS if after is None else min(MESSAGE_NS, after.start_ns - event.start_ns)
        yield _at(role, "messages", "X", f"{event.name} {event.message}", event, dur=ns / 1000, args=event.fields)


def _at(role: str, thread: str, phase: str, name: str, event: Event, **more: Any) -> _Json:
    place = {"pid": PROCESSES[role], "tid": THREADS[thread], "cat": thread, "ts": event.start_ns}
    return {"ph": phase, "name": name, **place, **more}
