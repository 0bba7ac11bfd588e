"""The timeline of one sequence as Chrome trace events, for Perfetto and chrome://tracing.

Two processes (target, draft) with three threads each: `sequence` (from the request to the end), `work` (what the worker
did, one thing at a time) and `messages` (a short slice for each message sent or received, so that its arrow has two
ends to hold on to).

References:
    Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from amusd.tracing.drafted import Fate, judge_steps
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
    trace = _Trace(min((event.start_ns for event in (*timeline.target, *timeline.draft)), default=0))
    fates = {
        step.event.start_ns: {fate.value: step.count(fate) for fate in Fate}
        for step in judge_steps(timeline.draft, timeline.target)
    }
    for role, events in (("target", timeline.target), ("draft", timeline.draft)):
        own = sorted(events, key=lambda event: event.start_ns)
        trace.name(role)
        trace.work(role, own, fates)
        trace.messages(role, [event for event in own if isinstance(event, MessageEvent)])
    trace.arrows("target", "draft", timeline.to_draft, first_id=1)
    trace.arrows("draft", "target", timeline.to_target, first_id=1 + len(timeline.to_draft))
    metadata = {**about, "zero_ns": trace.origin_ns}
    return {"traceEvents": trace.found, "displayTimeUnit": "ms", "metadata": metadata}


class _Trace:
    """The trace events so far, whose times are microseconds from `origin_ns` on."""

    def __init__(self, origin_ns: int) -> None:
        self.origin_ns = origin_ns
        self.found: list[_Json] = []

    def name(self, role: str) -> None:
        """The process of a worker and its threads."""
        process = {"ph": "M", "pid": PROCESSES[role]}
        self.found.append({**process, "name": "process_name", "args": {"name": role}})
        for name, tid in THREADS.items():
            self.found.append({**process, "name": "thread_name", "tid": tid, "args": {"name": name}})

    def work(self, role: str, events: Sequence[Event], fates: dict[int, dict[str, int]]) -> None:
        """Spans, and marks of what happened at once. `fates`: of the tokens of draft steps, by their start."""
        for event in events:
            own = fates.get(event.start_ns, {}) if isinstance(event, DraftStep) else {}
            if isinstance(event, (WholeSequence, *TARGET_WORK, *DRAFT_WORK, *WAITS)):
                thread = "sequence" if isinstance(event, WholeSequence) else "work"
                self._add(role, thread, "X", event.name, event.start_ns, event.duration_ns, args=event.fields | own)
            if isinstance(event, (Rollback, DraftLost, DraftBack, TargetGone)):
                self._add(role, "work", "i", event.name.replace("_", " "), event.start_ns, s="t", args=event.fields)

    def messages(self, role: str, events: Sequence[MessageEvent]) -> None:
        """A short slice for each message."""
        for event, after in zip_longest(events, events[1:]):
            ns = MESSAGE_NS if after is None else min(MESSAGE_NS, after.start_ns - event.start_ns)
            self._add(role, "messages", "X", f"{event.name} {event.message}", event.start_ns, ns, args=event.fields)

    def arrows(self, sender: str, receiver: str, flows: Sequence[Flow], *, first_id: int) -> None:
        """An arrow from each sending to its receiving."""
        for number, flow in enumerate(flows, start=first_id):
            self._add(sender, "messages", "s", flow.message, flow.sent.start_ns, id=number)
            self._add(receiver, "messages", "f", flow.message, flow.received.start_ns, id=number, bp="e")

    def _add(
        self, role: str, thread: str, phase: str, name: str, ns: int, duration_ns: int | None = None, **more: Any
    ) -> None:
        place = {"pid": PROCESSES[role], "tid": THREADS[thread], "cat": thread, "ts": (ns - self.origin_ns) / 1000}
        duration = {} if duration_ns is None else {"dur": duration_ns / 1000}
        self.found.append({"ph": phase, "name": name, **place, **duration, **more})
