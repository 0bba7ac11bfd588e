"""The commands of `amusd`: each is a module of this package, imported when the command runs.

The `run` of a module takes a `Job`, or a folder and further arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import NamedTuple


class Command(NamedTuple):
    """The properties of a command."""

    help: str
    takes: str = ""
    """Arguments in place of `KEY=VALUE ...`; the first is a folder."""
    computes: bool = True
    """Whether the command computes passes."""
    has_result: bool = True
    """False: the command has no result, no sweeps and no file of events."""
    has_folder: bool = True
    """Whether the command leaves a run directory."""
    needs_prompts: bool = False


COMMANDS: Mapping[str, Command] = {
    "generate": Command(
        "stream one answer to the terminal, or answer a file of prompts into a file", needs_prompts=True
    ),
    "serve": Command("answer over HTTP as OpenAI's servers do, and in a browser, until a signal", has_result=False),
    "draft": Command("draft for targets elsewhere until a signal", has_result=False, has_folder=False),
    "compare": Command("all modes on the same prompts, in one table", needs_prompts=True),
    "simulate": Command("what each mode would gain, from given times or those of a run", computes=False),
    "bench": Command("what one pass, one draft step and one message cost here, beside their floors"),
    "trace": Command(
        "what a run did: a timeline for Perfetto, a picture, and times", takes="RUN_DIR [sequence=N]", computes=False
    ),
    "doctor": Command("what will and will not work on this machine, and why", has_result=False, has_folder=False),
    "keys": Command("write the keys of a link between two machines to a new folder", takes="FOLDER", computes=False),
    "export-draft": Command(
        "write the embedded draft to a new folder, as a transformers checkpoint", takes="FOLDER", computes=False
    ),
}


def run_command(name: str, *given: object) -> int:
    """Call `run` of the command `name` with `given`; return the exit code."""
    module = import_module(f"{__name__}.{name.replace('-', '_')}")
    return int(module.run(*given))
