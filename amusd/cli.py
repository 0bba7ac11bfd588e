"""What the commands do in the target's process, once `launch/` has settled configuration, run directory and devices."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from amusd.answer import Generation
from amusd.bench.report import bench_text
from amusd.bench.run import run_bench
from amusd.compare import Comparison, per_prompt, records_of, rows_of, run_comparison
from amusd.config import RunConfig
from amusd.console import Console, percent, table
from amusd.doctor import run_doctor
from amusd.engine import Engine
from amusd.errors import ConfigError
from amusd.files import write_whole
from amusd.live import LiveView, TerminalScreen
from amusd.models.embedded_draft import export_draft, make_new_folder
from amusd.models.embedded_target import embedded_target_path
from amusd.reporting.answers import ANSWERS_FILE, PROMPTS_FILE, Record, answers_jsonl, prompts_csv
from amusd.reporting.columns import row_name
from amusd.reporting.comparison import write_comparison_page
from amusd.runtime.startup import make_recorder
from amusd.runtime.succession import DraftSource
from amusd.tracing.accounting import time_fractions
from amusd.tracing.timeline import read_timeline
from amusd.types import Mode, Role
from amusd.workload import WorkloadPrompt, prompts_of

PARTIAL_FILE = "partial.txt"
"""The text of an unfinished answer; stays where the target is killed, and otherwise makes way for the result."""


class _Done(NamedTuple):
    """What a command has to show for itself."""

    result: dict[str, Any]
    text: str
    """What standard output still lacks, for a person."""
    notes: Sequence[str]
    """Lines about the run."""
    records: Sequence[Record] = ()
    """Every answer of a comparison."""


def run_target(
    command: str, runs: Sequence[tuple[RunConfig, Path]], drafts: DraftSource
) -> Generator[int | ConfigError, None, None]:
    """The target's process: load, meet the draft, do one run after another, end the draft.

    Yields how each run ended: its exit code, or what its user got wrong, which does not concern the next one. A draft
    that is lost on the way is replaced from `drafts`. The code is 1 when no draft was to be had any more: the result is
    complete all the same, because the target went on alone, and is the last. Each run has a configuration and a
    directory; the engines of all are alike. Raises `ConfigError` for what no run could work with.
    """
    recorder = make_recorder(Role.TARGET, [directory for _, directory in runs])
    with ExitStack() as stack:
        engine: Engine | None = None
        for number, (config, run_directory) in enumerate(runs):
            console = Console(json_only=config.output == "json")
            try:
                # What can be wrong with the prompts is said before any weights are loaded.
                prompts = prompts_of(command, config)
            except ConfigError as mistake:
                yield mistake
                continue
            if engine is None:
                settings = config.engine_for(command)
                engine = stack.enter_context(Engine.connect(settings, drafts, recorder, report=console.note))
            engine.begin_run(number)
            try:
                exit_code = _run(command, config, engine, console, prompts, run_directory)
            except ConfigError as mistake:
                yield mistake
                continue
            yield exit_code
            if engine.draft_failure is not None:
                return


def _run(
    command: str,
    config: RunConfig,
    engine: Engine,
    console: Console,
    prompts: Sequence[WorkloadPrompt],
    run_directory: Path,
) -> int:
    num_losses, num_restarts = len(engine.draft_losses), engine.num_draft_restarts
    if command == "compare":
        result, text, notes, records = _compare(config, engine, console, prompts, run_directory)
    else:
        result, text, notes, records = _generate(config, engine, console, prompts[0], run_directory)
    result["run_dir"] = str(run_directory)
    losses = engine.draft_losses[num_losses:]
    if losses:
        result["draft_losses"] = list(losses)
    if engine.draft_failure is not None:
        result["draft_failure"] = engine.draft_failure
    try:
        _write_json(run_directory / "result.json", result)
        (run_directory / PARTIAL_FILE).unlink(missing_ok=True)
        if command == "compare":
            _write_answers(run_directory, records)
            write_comparison_page(run_directory, config, result)
    finally:  # what no file can take is shown all the same
        console.text(text)
        for line in notes:
            console.note(line)
        console.document(result)
    if not engine.worker.recorder.is_whole:
        return 2
    if engine.draft_failure is not None:
        console.note(f"the draft was lost and the target went on alone: {engine.draft_failure.rstrip()}")
        return 1
    if losses:
        num_restarts = engine.num_draft_restarts - num_restarts
        console.note(
            f"the draft was lost {_times(len(losses))} ({'; '.join(dict.fromkeys(losses))}) and replaced "
            f"{_times(num_restarts)}; the target went on alone in between"
        )
    return 0


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def doctor(config: RunConfig, mps_folder: Path | None = None) -> int:
    """Say what this machine has and what will work here. Returns 0 when everything does, else 2.

    `mps_folder`: where an MPS daemon has its pipes. Raises `ConfigError` for a GPU that is not there.
    """
    return run_doctor(config, Console(json_only=config.output == "json"), mps_folder)


def bench(config: RunConfig, run_directory: Path) -> int:
    """Measure the parts of this machine's pair. The caller has settled cores and threads of this process."""
    console = Console(json_only=config.output == "json")
    result = run_bench(config, console)
    result["complete"] = True
    result["environment"] = _read_json(run_directory / "environment.json")
    result["run_dir"] = str(run_directory)
    try:
        _write_json(run_directory / "result.json", result)
    finally:
        console.text(bench_text(result))
        console.document(result)
    return 0


def export_embedded_draft(folder: Path) -> int:
    """Write the embedded draft to `folder` as a transformers checkpoint. Raises `ConfigError`."""
    console = Console(json_only=False)
    make_new_folder(folder)  # before the target is unpacked: a mistake costs nothing
    target = embedded_target_path(report=console.note)
    export_draft(target, folder)
    console.note(f"the embedded draft is in {folder}; its target: {target}")
    return 0


def _generate(
    config: RunConfig, engine: Engine, console: Console, prompt: WorkloadPrompt, run_directory: Path
) -> _Done:
    """One answer, streamed. What there is of it is kept when the run is interrupted or this process is killed."""
    if config.prompt is None:
        console.text(f"> {prompt.text}\n")
    live = live_view(config, engine, console)
    answer = engine.stream(prompt.turns, config.sampling, decoding=config.decoding(), raw=config.workload.raw)
    complete = False
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
            _write_json(run_directory / "result.json", partial)
            (run_directory / PARTIAL_FILE).unlink(missing_ok=True)
            console.text("")
    return _Done({"complete": True, **answer.generation.as_dict()}, "", (_summary(answer.generation),))


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


def _compare(
    config: RunConfig, engine: Engine, console: Console, prompts: Sequence[WorkloadPrompt], run_directory: Path
) -> _Done:
    """Every contestant on every prompt. What was measured is kept when the run is interrupted."""
    comparison = Comparison.of(config)
    complete = False
    try:
        run_comparison(engine, config, prompts, comparison, console.progress, console.note)
        complete = True
    finally:
        console.clear_progress()
        if not complete and comparison.prompts:
            _write_json(run_directory / "result.json", {"complete": False, "rows": rows_of(comparison, engine)})
            _write_answers(run_directory, records_of(comparison))
    rows = rows_of(comparison, engine)
    timeline = read_timeline(run_directory)
    for row in rows:
        sequence_ids = row.pop("sequence_ids")
        row["draft_overlap_fraction"] = timeline.draft_overlap(sequence_ids)
        row["time"] = time_fractions(timeline, sequence_ids)
    result = {
        "complete": True,
        "rows": rows,
        "per_prompt": per_prompt(comparison),
        "num_refused_prompts": len(comparison.refused),
        "environment": _read_json(run_directory / "environment.json"),
    }
    notes = [f"prompt {number} was left out: {reason}" for number, reason in comparison.refused]
    return _Done(result, _comparison_table(rows), notes, records_of(comparison))


def _comparison_table(rows: Sequence[dict[str, Any]]) -> str:
    header = (
        "mode",
        "tokens/s",
        "x plain",
        "quartiles",
        "x best sync",
        "accepted",
        "tokens/pass",
        "idle t/d",
        "identical",
    )
    lines: list[tuple[str, ...]] = []
    for row in rows:
        same = row["identical_to_autoregressive"]
        plain = row["mode"] == Mode.AUTOREGRESSIVE.value
        lines.append(
            (
                row_name(row),
                f"{row['tokens_per_second']:.1f}",
                f"{row['speedup_vs_autoregressive']:.2f}",
                "-".join(f"{quartile:.2f}" for quartile in row["speedup_quartiles"] or ()),
                "" if plain else f"{row['speedup_vs_best_synchronous']:.2f}",
                "" if plain else percent(row["acceptance_rate"]),
                f"{row['mean_acceptance_length']:.2f}",
                percent(row["target_idle_fraction"]) + ("" if plain else "/" + percent(row["draft_idle_fraction"])),
                "" if plain or same is None else f"{same['num_identical']}/{same['num_prompts']}",
            )
        )
    return table(header, lines)


def _append(path: Path, text: str) -> None:
    """Nothing where the file cannot take it: the answer goes on, and its end says so if its result fails too."""
    if text:
        with suppress(OSError), path.open("a", encoding="utf-8") as file:
            file.write(text)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_whole(path, json.dumps(value, indent=1) + "\n")


def _write_answers(run_directory: Path, records: Sequence[Record]) -> None:
    write_whole(run_directory / ANSWERS_FILE, answers_jsonl(records))
    write_whole(run_directory / PROMPTS_FILE, prompts_csv(records))


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
