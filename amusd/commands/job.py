"""The input of a command, and the end of its run: result, notes, exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from amusd.config import RunConfig
from amusd.console import Console
from amusd.files import RESULT_FILE, write_json
from amusd.logs import logger

if TYPE_CHECKING:
    from amusd.engine import Engine
    from amusd.workload import WorkloadPrompt

Done: TypeAlias = tuple[dict[str, Any], str, Iterable[str]]
"""A command's result for `result.json`, the text to print at the end, and notes about the run."""


@dataclass(frozen=True)
class Job:
    """One run of a command."""

    config: RunConfig
    console: Console
    folder: Path
    """The run directory."""
    prompts: Sequence[WorkloadPrompt]
    make_engine: Callable[[], Engine]
    """Returns the last job's engine if configurations are equal, else a new engine."""

    def conclude(self, result: dict[str, Any], text: str, notes: Iterable[str] = ()) -> int:
        """Write `result.json`, and show the result even if that fails; return the exit code."""
        result["run_dir"] = str(self.folder)
        try:
            write_json(self.folder / RESULT_FILE, result)
        finally:
            self.console.text(text)
            self.console.document(result)
            for line in notes:
                logger.info("%s", line)
        return 0

    def answer(self, work: Callable[[Job, Engine], Done]) -> int:
        """Do `work` with the engine, and keep and show its result; return the exit code.

        1: the result is complete, but the draft was lost and not replaced; 2: the events could not be written.
        """
        engine = self.make_engine()
        draft = engine.draft
        losses_before, restarts_before = len(draft.losses), draft.num_restarts
        result, text, notes = work(self, engine)
        losses, num_restarts = draft.losses[losses_before:], draft.num_restarts - restarts_before
        result |= {"draft_losses": losses} if losses else {}
        result |= {"draft_failure": draft.failure} if draft.failure is not None else {}
        self.conclude(result, text, notes)
        if not engine.worker.recorder.is_whole:
            return 2
        if draft.failure is not None:
            logger.info(f"the draft was lost and the target went on alone: {draft.failure.rstrip()}")
            return 1
        if losses:
            lost = f"lost {_times(len(losses))} ({'; '.join(dict.fromkeys(losses))})"
            logger.info(
                f"the draft was {lost} and replaced {_times(num_restarts)}; the target went on alone in between"
            )
        return 0


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
