"""The `amusd` command. Hydra reads `key=value` arguments; torch is not imported here.

Exit codes: 0 done; 1 a failure (one line for a lost process, else a traceback); 2 a mistake of the user, or an output
that cannot be written (one line); 130 Ctrl-C; 143 SIGTERM.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import NoReturn

import amusd
from amusd.commands import COMMANDS, run_command
from amusd.console import Console
from amusd.errors import ConfigError
from amusd.huge_pages import restart_with_huge_pages
from amusd.logs import logger
from amusd.settings import nearest, shown

from .signals import end_of_program, raise_on_signals

MIN_OPEN_FILES = 32
"""An answer with a draft opens 16; some links and each further rank need more."""
_USAGE = """\
usage: amusd COMMAND [KEY=VALUE ...]         answer, compare, predict, measure
       amusd COMMAND -m KEY=a,b [...]        a sweep by Hydra; with the run_dir of an interrupted one, go on with it
       amusd COMMAND --help                  all keys and choices; --cfg job prints a configuration; --info, -cd, -cn
       amusd trace RUN_DIR [sequence=N]
       amusd keys FOLDER
       amusd export-draft FOLDER

{commands}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    computing = {name for name, command in COMMANDS.items() if command.computes}
    if argv is None and computing.intersection(arguments[:1]):
        restart_with_huge_pages()
    return end_of_program(lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command in ("-h", "--help"):
        lines = (f"  {name:<13} {command.help}" for name, command in COMMANDS.items())
        Console().text(_USAGE.format(commands="\n".join(lines)), end="")
        return 0
    if command == "--version":
        Console().text(f"amusd {amusd.__version__}")
        return 0
    if command not in COMMANDS:
        named = f"{shown(command)}: " if command else ""
        raise ConfigError(f"{named}name a command first; allowed: {', '.join(COMMANDS)}{nearest(command, [*COMMANDS])}")
    _check_process()
    if COMMANDS[command].takes:
        return _run_on_folder(command, rest)
    if any(word.startswith("-") or "hydra" in word.partition("=")[0] for word in rest):
        return _run_hydra(command, rest)
    return _run_once(command, rest)


def _check_process() -> None:
    """Raise `ConfigError` without a working directory, or if too few files may be open."""
    try:
        Path.cwd()
    except OSError:
        raise ConfigError("the working directory is gone: go to one that exists") from None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit < MIN_OPEN_FILES:
        raise ConfigError(f"ulimit -n {limit}: a process needs {MIN_OPEN_FILES} open files at least")


def _run_once(command: str, arguments: list[str]) -> int:
    """One run, without `hydra.main`, which would compose the configuration twice."""
    from .compose import compose_config
    from .jobs import Jobs

    config = compose_config(arguments)
    with closing(Jobs(command)) as jobs:
        raise_on_signals()
        return jobs.run(config)


def _run_hydra(command: str, arguments: list[str]) -> int:
    """Run a sweep, or what Hydra's own options ask for."""
    from hydra._internal.utils import get_args_parser

    from .compose import errors_of_hydra, for_hydra, text_of
    from .jobs import Jobs
    from .run_directory import OVERRIDES_FILE, new_folder, sole_sweep

    named = [text_of(argument) for argument in arguments if re.match(r"\+*run_dir=", argument)]
    folder = new_folder() if not named or named[-1] in ("", "null") else Path(named[-1])
    is_new = not folder.exists()
    # Hydra's parser wants all overrides in a row
    words = sorted([*arguments, f"run_dir={folder}"], key=lambda word: word.startswith("-") or "=" not in word)
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]  # instead of printing a page
    options, others = parser.parse_known_args(words)
    typed = [*options.overrides, *others]
    is_sweep, is_json = options.multirun, "output=json" in arguments
    if is_sweep and not COMMANDS[command].has_result:
        raise ConfigError(f"-m: `amusd {command}` has one configuration; leave -m out")
    own = [word for word in words if word not in typed]
    with closing(Jobs(command)) as jobs, sole_sweep(folder) if is_sweep else nullcontext():
        try:
            with errors_of_hydra(typed):
                code = _hydra(jobs, [*for_hydra(typed, own_config=bool(options.config_name)), *own], f"amusd {command}")
        except (ConfigError, KeyboardInterrupt) as end:
            has_jobs = is_sweep and any(folder.glob(f"**/{OVERRIDES_FILE}"))
            if is_sweep and is_new and not has_jobs:
                shutil.rmtree(folder, ignore_errors=True)
            if has_jobs and isinstance(end, KeyboardInterrupt):
                _summarize(folder, is_json=is_json)
                logger.info(f"interrupted; the same command with run_dir={folder} goes on from here")
            raise
    if is_sweep and code == 0 and not _summarize(folder, is_json=is_json):
        return jobs.exit_code or 1
    return code or jobs.exit_code


def _refuse(message: str) -> NoReturn:
    raise ConfigError(message)


def _hydra(task: object, arguments: Sequence[str], program: str) -> int:
    import hydra

    from .compose import CONFIG_NAME, HYDRA_VERSION, conf_folder, store_defaults

    console = Console()  # raises without standard output, to which Hydra would print
    store_defaults()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # its errors are raised, not printed
    decorate = hydra.main(version_base=HYDRA_VERSION, config_path=str(conf_folder()), config_name=CONFIG_NAME)
    before, sys.argv = sys.argv, [program, *arguments]
    try:
        with suppress(BrokenPipeError):  # whoever read Hydra's output has left
            decorate(task)()  # type: ignore[arg-type]  # any callable does
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = before
        console.text("", end="")  # flushes what Hydra has printed
    return 0


def _summarize(folder: Path, *, is_json: bool) -> bool:
    from .run_directory import summarize, summary_table

    document = summarize(folder.absolute())
    console = Console(json_only=is_json)
    console.text(summary_table(document))
    console.document(document)
    logger.info(f"jobs: {len(document['jobs'])}, in {folder}")
    return all(job["rows"] for job in document["jobs"])


def _run_on_folder(command: str, arguments: Sequence[str]) -> int:
    takes = COMMANDS[command].takes
    if {"-h", "--help"}.intersection(arguments):
        Console().text(f"usage: amusd {command} {takes}\n\n{COMMANDS[command].help}")
        return 0
    options = [word for word in arguments if re.match(r"-|[\w.]+=", word)]
    folders = [word for word in arguments if word not in options]
    if len(folders) != 1 or len(arguments) > len(takes.split()):
        raise ConfigError(f"{command}: name one folder, and nothing else: amusd {command} {takes}")
    return run_command(command, Path(folders[0]), *options)


if __name__ == "__main__":
    sys.exit(main())
