"""`amusd trace`: a run's events as a file for trace viewers, a picture and an account. Needs no model and no torch.

In the file, target and draft are processes with the threads `sequence`, `work` and `messages`. A message is a short
slice, since arrows connect slices. The account sums up the passes, waits and draft steps of each schedule, and
counts the passes that should have waited.

References: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from amusd.commands import plots
from amusd.console import Console
from amusd.errors import ConfigError
from amusd.files import write_whole
from amusd.tracing.events import DRAFT_WORK, TARGET_WORK, DraftStep, Event, MessageEvent, TargetPass, WholeSequence
from amusd.tracing.timeline import Fate, Timeline, read_timeline

TRACE_FILE = "trace.json"
PROCESSES = {"target": 1, "draft": 2}
THREADS = {"sequence": 1, "work": 2, "messages": 3}
SPANS = ("sequence", "target_wait", "draft_wait")
MARKS = ("rollback", "draft_lost", "draft_back", "target_gone")
MESSAGE_NS = 2_000

_Json = dict[str, Any]

_LOCKSTEP = ("autoregressive", "synchronous")


def run(run_directory: Path, wanted: str | None = None) -> int:
    """Write `trace.json` and the figure `timeline` of one sequence into the run directory.

    `wanted`: `sequence=N`; by default the last sequence with an asynchronous draft, else with a draft, else the last.
    The figure shows the last synchronous sequence above an asynchronous one. An account of each schedule is printed.
    Returns the exit code. Raises `ConfigError` if the run or the sequence is missing.
    """
    console, timeline = Console(), _read(run_directory)
    sequences = [event for event in timeline.target if isinstance(event, WholeSequence)]
    if not sequences:
        raise ConfigError(
            f"{run_directory}/events: hold no answer; is it a run directory (of a sweep: a job's) whose run has ended?"
        )
    sequence, parts = _choose(sequences, wanted), timeline.by_sequence()
    schedule, part = schedule_name(sequence), parts[sequence.sequence_id]
    about = {"run_dir": str(run_directory), "sequence_id": sequence.sequence_id, "schedule": schedule}
    write_whole(run_directory / TRACE_FILE, json.dumps(chrome_trace(part, about)) + "\n")
    console.text(f"sequence {sequence.sequence_id}: {schedule}")
    console.text(f"{run_directory / TRACE_FILE}: open it in https://ui.perfetto.dev or chrome://tracing")
    beside = [one for one in sequences if one.policy == "synchronous" and sequence.policy not in _LOCKSTEP]
    shown = [(schedule_name(one), parts[one.sequence_id]) for one in (*beside[-1:], sequence)]
    console.text(plots.write(lambda: plots.draw_timeline(shown), run_directory, "timeline"))
    for name in dict.fromkeys(map(schedule_name, sequences)):
        own = [parts[one.sequence_id] for one in sequences if schedule_name(one) == name]
        console.text("\n".join((f"{name}:", *account(own))))
    return 0


def schedule_name(sequence: WholeSequence) -> str:
    """Mode, policy and drafter of an answer, for people."""
    name = sequence.policy if sequence.policy in _LOCKSTEP else f"asynchronous ({sequence.policy})"
    if sequence.policy == "synchronous":
        name += f", blocks of {sequence.max_lookahead}"
    return name if sequence.drafter is None else f"{name}, drafter {sequence.drafter}"


def _read(run_directory: Path) -> Timeline:
    try:
        return read_timeline(run_directory)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run_directory}/events: cannot be read ({error})") from None


def _choose(sequences: Sequence[WholeSequence], wanted: str | None) -> WholeSequence:
    if wanted is None:
        return max(reversed(sequences), key=lambda one: (one.drafter is not None, one.policy not in _LOCKSTEP))
    found = next((sequence for sequence in sequences if wanted == f"sequence={sequence.sequence_id}"), None)
    if found is None:
        first, last = sequences[0].sequence_id, sequences[-1].sequence_id
        raise ConfigError(f"{wanted}: no such sequence; this run has sequence={first} to {last}")
    return found


# The file for trace viewers


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
    """Spans, and marks of instants. `fates`: of each draft step's tokens, by the start of the step."""
    for event in events:
        own = fates.get(event.start_ns, {}) if isinstance(event, DraftStep) else {}
        if event.name in (*SPANS, *TARGET_WORK, *DRAFT_WORK):
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


# The account


def account(parts: Sequence[Timeline]) -> Iterator[str]:
    """Lines for people about the sequences of one schedule; none without passes."""
    target, draft = ([event for part in parts for event in part[place]] for place in range(2))
    passes = [event for part in parts for event in part.passes]
    steps = [event for event in draft if isinstance(event, DraftStep)]
    waits = [event.duration_ns / 1e6 for event in target if event.name == "target_wait"]
    if not passes:
        return
    each = sum(event.num_tokens for event in passes) / len(passes)
    yield f"{len(passes)} passes, {each:.2f} tokens each; {len(waits)} waits, {sum(waits):.0f} ms"
    whole_ns, target_ns, draft_ns = (
        sum(event.duration_ns for event in events if event.name in names)
        for events, names in ((target, ("sequence",)), (target, TARGET_WORK), (draft, DRAFT_WORK))
    )
    accepted, judged = (sum(getattr(event, name) for event in passes) for name in ("num_accepted", "num_judged"))
    num_rollbacks = sum(event.name == "rollback" for event in draft)
    yield (
        f"  {whole_ns / 1e6:.0f} ms: target at work {target_ns / whole_ns:.0%}, draft {draft_ns / whole_ns:.0%}; "
        f"{accepted} of {judged} candidates accepted, {num_rollbacks} rollbacks"
    )
    for number, ns in _medians((event.num_candidates, event.duration_ns) for event in passes):
        own = [event.num_accepted for event in passes if event.num_candidates == number]
        yield f"  {number} candidates: {len(own)} passes, {ns / 1e6:.1f} ms, {statistics.fmean(own):.2f} accepted"
    reasons = Counter(event.reason.partition(":")[0] for event in passes if event.reason)
    if reasons:
        yield "  " + ", ".join(f"{reason}: {number} passes" for reason, number in reasons.most_common())
    if steps:
        rows = Counter(event.num_tokens for event in steps)
        medians = _medians((event.num_tokens, event.duration_ns) for event in steps)
        yield "  draft steps by rows: " + ", ".join(f"{n}: {rows[n]} of {ns / 1e6:.1f} ms" for n, ns in medians)
        num_empty = sum(not event.num_candidates for event in passes)
        worth_ns, num_late = _regret(parts, passes)
        worth = f"within {worth_ns / 1e6:.1f} ms, which one is worth"
        yield f"  {num_empty} passes began without a candidate; for {num_late} of them one was sent {worth}"


def _regret(parts: Sequence[Timeline], passes: Sequence[TargetPass]) -> tuple[float, int]:
    """The worth of a first candidate in nanoseconds, and the number of passes that should have waited for one.

    The worth is the candidate's probability of acceptance times the time per token. A pass should have waited if it
    began without candidates and a fitting one was sent within this time.
    """
    tested = [event.num_accepted > 0 for event in passes if event.num_candidates]
    total_ns = sum(own[-1].end_ns - own[0].start_ns for own in (part.passes for part in parts) if own)
    worth_ns = statistics.fmean(tested or (0,)) * total_ns / sum(event.num_tokens for event in passes)
    num_late = 0
    for part in parts:
        sent = [event for event in part.draft if isinstance(event, MessageEvent) and event.name == "send"]
        for begun in (event for event in part.passes if not event.num_candidates):
            fitting = (each.start_ns for each in sent if each.base == begun.start_length and each.num_tokens)
            came_ns = min((ns for ns in fitting if ns > begun.start_ns), default=begun.end_ns)
            num_late += came_ns < min(begun.end_ns, begun.start_ns + worth_ns)
    return worth_ns, num_late


def _medians(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, float]]:
    """Pairs of a number and the median of its values, by number."""
    found = defaultdict(list)
    for number, value in pairs:
        found[number].append(value)
    return [(number, statistics.median(values)) for number, values in sorted(found.items())]
