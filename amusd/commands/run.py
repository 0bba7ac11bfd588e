"""`amusd generate`, `compare` and `serve` over an engine: the work, its files, and what is shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from amusd.commands import plots
from amusd.commands.compare import compare
from amusd.commands.generate import generate, generate_file
from amusd.config import RunConfig
from amusd.console import Console
from amusd.engine import Engine
from amusd.errors import ConfigError
from amusd.logs import logger
from amusd.workload import WorkloadPrompt


def serve(config: RunConfig, make_engine: Callable[[], Engine]) -> int:
    """Serve; returns the exit code. Raises `ConfigError` as `run_server`, or without its packages."""
    try:
        from amusd.serving.server import run_server
    except ModuleNotFoundError as error:
        raise ConfigError(f"serve: needs {error.name}, which is not installed; pip install 'amusd[serve]'") from None
    run_server(config, make_engine)
    return 0


def answer(
    command: str, config: RunConfig, engine: Engine, console: Console, prompts: list[WorkloadPrompt], folder: Path
) -> int:
    """Do `generate` or `compare`, and keep and show the result; returns the exit code.

    1: no draft is to be had any more, though the result is complete; 2: the events could not be written.
    """
    losses_before, restarts_before = len(engine.draft.losses), engine.draft.num_restarts
    if command == "compare":
        result, text, notes = compare(config, engine, prompts, folder)
    elif config.out is not None:
        result, text, notes = generate_file(config, engine, folder)
    else:
        result, text, notes = generate(config, engine, console, prompts[0], folder)
    losses = engine.draft.losses[losses_before:]
    result |= {"draft_losses": losses} if losses else {}
    result |= {"draft_failure": engine.draft.failure} if engine.draft.failure is not None else {}
    console.conclude(result, text, folder, notes)
    if command == "compare":
        logger.info("%s", plots.write(lambda: plots.draw_comparison(result["rows"]), folder, "comparison"))
    if not engine.worker.recorder.is_whole:
        return 2
    if engine.draft.failure is not None:
        logger.info(f"the draft was lost and the target went on alone: {engine.draft.failure.rstrip()}")
        return 1
    if losses:
        num_restarts = engine.draft.num_restarts - restarts_before
        lost = f"lost {_times(len(losses))} ({'; '.join(dict.fromkeys(losses))})"
        logger.info(f"the draft was {lost} and replaced {_times(num_restarts)}; the target went on alone in between")
    return 0


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
