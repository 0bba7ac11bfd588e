"""`amusd trace`: a run's events as a file for trace viewers and a picture. Needs no model and no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from amusd.commands import plots
from amusd.console import Console
from amusd.errors import ConfigError
from amusd.files import write_whole
from amusd.tracing.account import account
from amusd.tracing.chrome import chrome_trace
from amusd.tracing.events import WholeSequence
from amusd.tracing.timeline import Timeline, read_timeline

TRACE_FILE = "trace.json"

_LOCKSTEP = ("autoregressive", "synchronous")


def run(run_directory: Path, wanted: str | None = None) -> int:
    """Write `trace.json` and the figure `timeline` of one sequence into the run directory.

    `wanted`: `sequence=N`; by default the last sequence with an asynchronous draft, else with a draft, else the last.
    The figure shows the last synchronous one above it. What each schedule's passes were is printed. Returns the exit
    code. Raises `ConfigError` for no run directory or no such sequence.
    """
    console, timeline = Console(), _read(run_directory)
    sequences = [event for event in timeline.target if isinstance(event, WholeSequence)]
    if not sequences:
        raise ConfigError(f"{run_directory}/events: hold no answer; is it a run directory, and has the run ended?")
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
