"""`amusd generate`: one answer, streamed, with its figures."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from amusd.answer import Generation
from amusd.commands.live import LiveView, TerminalScreen
from amusd.config import RunConfig
from amusd.console import Console, percent
from amusd.engine import Engine
from amusd.files import write_json
from amusd.reporting.answers import Record
from amusd.workload import WorkloadPrompt

PARTIAL_FILE = "partial.txt"
"""The text of an unfinished answer; stays where the target is killed, and otherwise makes way for the result."""


class Done(NamedTuple):
    """What a command has to show for itself."""

    result: dict[str, Any]
    text: str
    """What standard output still lacks, for a person."""
    notes: Sequence[str]
    """Lines about the run."""
    records: Sequence[Record] = ()
    """Every answer of a comparison."""


def generate(config: RunConfig, engine: Engine, console: Console, prompt: WorkloadPrompt, run_directory: Path) -> Done:
    """One answer, streamed. What there is of it is kept when the run is interrupted or this process is killed."""
    if config.prompt is None:
        console.text(f"> {prompt.text}\n")
    live = live_view(config, engine, console)
    answer = engine.stream(prompt.turns, config.sampling, decoding=config.decoding(), raw=config.workload.raw)
    complete = False
    (run_directory / PARTIAL_FILE).unlink(missing_ok=True)  # a file, or a link, that lay in the folder before
    try:
        for token in answer:
            _append(run_directory / PARTIAL_FILE, token.text)
            if live is not None:
                live.write(token.text)
            else:
                console.text(token.text, end="")
        complete = True
    finally:
        if live is not None:
            live.close()
        if not complete:
            partial = {"complete": False, "text": answer.text, "token_ids": list(answer.token_ids)}
            write_json(run_directory / "result.json", partial)
            (run_directory / PARTIAL_FILE).unlink(missing_ok=True)
            console.text("")
    return Done({"complete": True, **answer.generation.as_dict()}, "", (_summary(answer.generation),))


def live_view(config: RunConfig, engine: Engine, console: Console) -> LiveView | None:
    """What shows an answer with `view=live`; None, with a reason, where there is no terminal."""
    if config.view == "plain":
        return None
    if console.terminal is None:
        console.note("view=live: needs a terminal for its output; going on plain")
        return None
    return LiveView(TerminalScreen(console.terminal), engine.worker.recorder)


def _summary(generation: Generation) -> str:
    figures = generation.metrics.as_dict()
    parts = [
        f"{generation.mode.value}: {figures['num_tokens']} tokens ({generation.finish_reason.value})",
        f"{figures['tokens_per_second']:.1f} tokens/s, first after {figures['time_to_first_token_ms']:.0f} ms",
    ]
    if generation.drafter is not None:
        parts += [
            f"drafter {generation.drafter}: {_accepted(figures)}",
            f"{figures['mean_acceptance_length']:.2f} tokens a pass",
            f"target idle {percent(figures['target_idle_fraction'])}",
            f"draft idle {percent(figures['draft_idle_fraction'])}",
        ]
    return "; ".join(parts)


def _accepted(figures: dict[str, Any]) -> str:
    verified = figures["num_draft_tokens"]
    return f"{figures['num_accepted_draft_tokens']} of {verified} candidates accepted" if verified else "no candidates"


def _append(path: Path, text: str) -> None:
    """Nothing where the file cannot take it: the answer goes on, and its end says so if its result fails too."""
    if text:
        with suppress(OSError), path.open("a", encoding="utf-8") as file:
            file.write(text)
