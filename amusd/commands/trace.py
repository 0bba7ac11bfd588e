"""`amusd trace`: a run's events as a file for trace viewers and a picture. Needs no model and no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from amusd.commands import plots
from amusd.console import Console, percent
from amusd.errors import ConfigError
from amusd.files import write_whole
from amusd.tracing.account import account
from amusd.tracing.chrome import chrome_trace
from amusd.tracing.events import DRAFT_WORK, TARGET_WORK, TargetPass, WholeSequence
from amusd.tracing.timeline import Timeline, read_timeline

TRACE_FILE = "trace.json"

_LOCKSTEP = ("autoregressive", "synchronous")


def trace(run_directory: Path, sequence_id: int | None = None) -> int:
    """Write `trace.json` and the figure `timeline` of one sequence into the run directory.

    By default the last sequence with an asynchronous draft, else with a draft, else the last. The figure shows the last
    synchronous one above it. What each schedule's passes were is printed. Returns the exit code. Raises `ConfigError`
    for no run directory or no such sequence.
    """
    console = Console()
    timeline = _read(run_directory)
    sequences = [event for event in timeline.target if isinstance(event, WholeSequence)]
    sequence = _choose(sequences, sequence_id)
    schedule = schedule_name(sequence)
    parts = timeline.by_sequence()
    part = parts[sequence.sequence_id]
    about = {"run_dir": str(run_directory), "sequence_id": sequence.sequence_id, "schedule": schedule}
    write_whole(run_directory / TRACE_FILE, json.dumps(chrome_trace(part, about)) + "\n")
    console.text(f"sequence {sequence.sequence_id}: {schedule}\n{summary(part, sequence)}")
    for name in dict.fromkeys(map(schedule_name, sequences)):
        own = [parts[one.sequence_id] for one in sequences if schedule_name(one) == name]
        console.text("\n".join((f"{name}:", *account(own))))
    console.text(f"{run_directory / TRACE_FILE}: open it in https://ui.perfetto.dev or chrome://tracing")
    beside = [one for one in sequences if one.policy == "synchronous" and sequence.policy not in _LOCKSTEP]
    shown = [(schedule_name(one), parts[one.sequence_id]) for one in (*beside[-1:], sequence)]
    console.text(plots.write(lambda: plots.draw_timeline(shown), run_directory, "timeline"))
    return 0


def schedule_name(sequence: WholeSequence) -> str:
    """Mode, policy and drafter of an answer, for people."""
    name = sequence.policy if sequence.policy in _LOCKSTEP else f"asynchronous ({sequence.policy})"
    if sequence.policy == "synchronous":
        name += f", blocks of {sequence.max_lookahead}"
    return name if sequence.drafter is None else f"{name}, drafter {sequence.drafter}"


def summary(part: Timeline, whole: WholeSequence) -> str:
    """The figures of one sequence, in two lines."""
    passes = [event for event in part.target if isinstance(event, TargetPass)]
    num_tokens = sum(event.num_tokens for event in passes)
    target, draft = (
        percent(sum(event.duration_ns for event in events if event.name in work) / whole.duration_ns)
        for events, work in ((part.target, TARGET_WORK), (part.draft, DRAFT_WORK))
    )
    accepted, judged = (sum(getattr(event, name) for event in passes) for name in ("num_accepted", "num_judged"))
    num_rollbacks = sum(event.name == "rollback" for event in part.draft)
    return (
        f"{num_tokens} tokens in {len(passes)} passes, {whole.duration_ns / 1e6:.0f} ms with the prompt's prefill\n"
        f"target at work {target}, draft {draft}; {accepted} of {judged} candidates accepted, {num_rollbacks} rollbacks"
    )


def _read(run_directory: Path) -> Timeline:
    try:
        timeline = read_timeline(run_directory)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run_directory}/events: cannot be read ({error})") from None
    if not any(isinstance(event, WholeSequence) for event in timeline.target):
        raise ConfigError(f"{run_directory}/events: hold no answer; is it a run directory, and has the run ended?")
    return timeline


def _choose(sequences: Sequence[WholeSequence], sequence_id: int | None) -> WholeSequence:
    if sequence_id is None:
        return max(reversed(sequences), key=lambda one: (one.drafter is not None, one.policy not in _LOCKSTEP))
    found = next((sequence for sequence in sequences if sequence.sequence_id == sequence_id), None)
    if found is None:
        first, last = sequences[0].sequence_id, sequences[-1].sequence_id
        raise ConfigError(f"sequence={sequence_id}: no such sequence; this run has {first} to {last}")
    return found
