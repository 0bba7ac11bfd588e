"""The `amusd` command, which leaves `key=value` arguments to Hydra. Imports no torch.

Exit codes: 0 done; 1 a failure (one line for a lost process, else a traceback); 2 the user's mistake
or an output that cannot be written (one line); 130 Ctrl-C; 143 SIGTERM.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NoReturn

import amusd
from amusd.console import Console
from amusd.errors import ConfigError
from amusd.files import make_new_folder
from amusd.huge_pages import restart_with_huge_pages
from amusd.logs import logger
from amusd.settings import nearest, shown

from .signals import end_of_program, raise_on_signals

COMMANDS = {
    "generate": "answer one prompt, whose text streams to the terminal, or a file of them into another file",
    "serve": "answer over HTTP as OpenAI's servers do, and in a browser, until a signal ends it",
    "compare": "all modes on the same prompts, in one table",
    "simulate": "what each mode would gain, from times and an acceptance rate, or from those of a run",
    "bench": "what one pass, one draft step and one message cost here, beside their floors",
    "trace": "what a run did: a timeline for Perfetto, a picture, and where the time went",
    "doctor": "what will and will not work on this machine, and why",
    "keys": "write the keys of a link between two machines to a new folder",
    "export-draft": "write the embedded draft to a new folder, as a transformers checkpoint for other systems",
}
COMPUTING = ("generate", "serve", "compare", "bench", "doctor")
"""Commands that compute passes."""
MIN_OPEN_FILES = 32
"""An answer with a draft takes 16; other links and further ranks take more."""
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
    if argv is None and arguments[:1] and arguments[0] in COMPUTING:
        restart_with_huge_pages()
    return end_of_program(lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command in ("-h", "--help"):
        lines = (f"  {name:<13} {what}" for name, what in COMMANDS.items())
        Console().text(_USAGE.format(commands="\n".join(lines)), end="")
        return 0
    if command == "--version":
        Console().text(f"amusd {amusd.__version__}")
        return 0
    if command not in COMMANDS:
        named = f"{shown(command)}: " if command else ""
        raise ConfigError(f"{named}name a command first; allowed: {', '.join(COMMANDS)}{nearest(command, [*COMMANDS])}")
    _check_process()
    if command == "trace":
        return _trace(rest)
    if command in ("keys", "export-draft"):
        return _write_folder(command, rest)
    if any(word.startswith("-") or "hydra" in word.partition("=")[0] for word in rest):
        return _run_hydra(command, rest)
    return _run_once(command, rest)


def _check_process() -> None:
    """Raise `ConfigError` for what no command can do without."""
    try:
        Path.cwd()
    except OSError:
        raise ConfigError("the working directory is gone: go to one that exists") from None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit < MIN_OPEN_FILES:
        raise ConfigError(f"ulimit -n {limit}: a process needs {MIN_OPEN_FILES} open files at least")


def _run_once(command: str, arguments: list[str]) -> int:
    """One run, without Hydra's own program, which composes a configuration twice before a job begins."""
    from .compose import compose_config
    from .jobs import Jobs

    config = compose_config(arguments)
    with closing(Jobs(command)) as jobs:
        raise_on_signals()
        return jobs.run(config)


def _run_hydra(command: str, arguments: list[str]) -> int:
    """A sweep, or what else Hydra's own options ask for."""
    from hydra._internal.utils import get_args_parser

    from .compose import errors_of_hydra, for_hydra, text_of
    from .jobs import Jobs
    from .run_directory import OVERRIDES_FILE, new_folder

    folders = [text_of(argument) for argument in arguments if argument.startswith("run_dir=")]
    folder = Path(folders[-1]) if folders else new_folder()
    is_new = not folder.exists()
    # Hydra's parser takes overrides that stand together
    words = sorted([*arguments, f"run_dir={folder}"], key=lambda word: word.startswith("-") or "=" not in word)
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]  # which else prints a page
    options, others = parser.parse_known_args(words)
    typed = [*options.overrides, *others]
    is_sweep, is_json = options.multirun, "output=json" in arguments
    if is_sweep and command in ("serve", "doctor"):
        raise ConfigError(f"-m: `amusd {command}` has one configuration; leave -m out")
    own = [word for word in words if word not in typed]
    with closing(Jobs(command)) as jobs:
        try:
            with errors_of_hydra(typed):
                code = _hydra(jobs, [*for_hydra(typed), *own], f"amusd {command}")
        except ConfigError:
            if is_sweep and is_new and not any(folder.glob(f"**/{OVERRIDES_FILE}")):
                shutil.rmtree(folder, ignore_errors=True)  # no job has begun
            raise
        except KeyboardInterrupt:
            if is_sweep:
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

    store_defaults()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # its errors are raised, not printed
    decorate = hydra.main(version_base=HYDRA_VERSION, config_path=str(conf_folder()), config_name=CONFIG_NAME)
    before, sys.argv = sys.argv, [program, *arguments]
    try:
        with suppress(BrokenPipeError):  # nobody reads what Hydra prints
            decorate(task)()  # type: ignore[arg-type]  # any callable does
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = before
        if sys.stdout is not None:
            Console().text("", end="")  # which flushes what Hydra has printed
    return 0


def _summarize(folder: Path, *, is_json: bool) -> bool:
    from .sweep import summarize, summary_table

    document = summarize(folder.absolute())
    console = Console(json_only=is_json)
    console.text(summary_table(document))
    console.document(document)
    logger.info(f"{len(document['jobs'])} jobs in {folder}")
    return all(job["rows"] for job in document["jobs"])


def _write_folder(command: str, arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or "=" in arguments[0] or arguments[0].startswith("-"):
        raise ConfigError(f"{command}: name the folder to write, and nothing else: amusd {command} FOLDER")
    folder = Path(arguments[0])
    if command == "export-draft":
        from amusd.models.embedded_draft import export_draft
        from amusd.models.embedded_target import embedded_target_path

        make_new_folder(folder)  # before the target is unpacked: a mistake costs nothing
        target = embedded_target_path()
        export_draft(target, folder)
        logger.info(f"the embedded draft is in {folder}; its target: {target}")
        return 0
    from amusd.transport.curve import write_keys

    write_keys(folder)
    logger.info(f"keys: {folder}; each machine needs its own role's .key_secret and the other role's .key")
    return 0


def _trace(arguments: Sequence[str]) -> int:
    folder, *rest = arguments or [""]
    number = rest[0].removeprefix("sequence=") if rest else None
    if not folder or "=" in folder or len(rest) > 1 or (number is not None and not number.isdecimal()):
        raise ConfigError("trace: name the folder of a run, and nothing else: amusd trace RUN_DIR [sequence=N]")
    from amusd.commands.trace import trace

    return trace(Path(folder), None if number is None else int(number))


if __name__ == "__main__":
    sys.exit(main())
