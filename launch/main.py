"""The `amusd` command: reads the arguments, composes the configuration once, starts the workers. Imports no torch.

Exit codes: 0 done, 1 a failure (one line where a process was lost, else its traceback), 2 the user's mistake or an
output that cannot be written (one line), 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import amusd
from amusd.config import HIDDEN, RunConfig
from amusd.console import Console, tell
from amusd.errors import ConfigError
from amusd.settings import nearest

from .keys import CONFIG_DIR, CONFIG_NAME
from .manual import COMMANDS, EXPORT, KEYS, TRACE, overview, reference

_SHORT = {"-h": "--help", "-m": "--multirun", "-c": "--cfg", "-cd": CONFIG_DIR, "-cn": CONFIG_NAME}
_FLAGS = ("--help", "--multirun", "--version")
_WITH_VALUE = ("--cfg", CONFIG_DIR, CONFIG_NAME)
_ROLES = "--roles"


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """A command line, taken apart."""

    command: str | None
    flags: frozenset[str]
    overrides: tuple[str, ...]
    """As typed; before them `--config-dir=...` and `--config-name=...`."""
    show: str | None = None
    """The choices of `--cfg`: what to print instead of running."""
    roles: str | None = None
    """Another module in the place of the workers' work (the launcher's own tests)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    try:
        return _run(_parse(sys.argv[1:] if argv is None else argv), Console())
    except ConfigError as error:
        tell(str(error))
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _parse(argv: Sequence[str]) -> Arguments:
    """Take a command line apart; options may stand anywhere. Raises `ConfigError`."""
    words: list[str] = []
    flags: set[str] = set()
    values: dict[str, str] = {}
    rest = list(argv)
    while rest:
        typed = rest.pop(0)
        if not typed.startswith("-"):
            words.append(typed)
            continue
        name, equals, value = typed.partition("=")
        name = _SHORT.get(name, name)
        if name in _FLAGS and not equals:
            flags.add(name)
        elif name in (*_WITH_VALUE, _ROLES) and (equals or rest):
            values[name] = value if equals else rest.pop(0)
        else:
            raise ConfigError(f"{typed}: {_not_an_option(name)}")
    command = words[0] if words else None
    if command is not None and command not in COMMANDS:
        reason = "name a command first" if "=" in command else "no such command"
        near = "" if "=" in command else nearest(command, COMMANDS)
        raise ConfigError(f"{command}: {reason}; allowed: {', '.join(COMMANDS)}{near}")
    roles, show = values.pop(_ROLES, None), values.pop("--cfg", None)
    overrides = (*(f"{name}={value}" for name, value in values.items()), *words[1:])
    return Arguments(command=command, flags=frozenset(flags), overrides=overrides, show=show, roles=roles)


def _not_an_option(name: str) -> str:
    if name in _FLAGS:
        return "takes no value"
    if name in _WITH_VALUE:
        return "needs a value"
    known = (*_FLAGS, *_WITH_VALUE, *_SHORT)
    return f"no such option; allowed: {', '.join(known)}{nearest(name, known)}"


def _run(arguments: Arguments, console: Console) -> int:
    command = arguments.command
    if "--help" in arguments.flags:
        has_keys = command and command not in (EXPORT, KEYS, TRACE)
        console.text(reference(command) if has_keys else overview(), end="")
        return 0
    if "--version" in arguments.flags:
        console.text(f"amusd {amusd.__version__}")
        return 0
    if command is None:
        raise ConfigError(f"name a command: {', '.join(COMMANDS)}; `amusd --help` says what they do")
    if command == EXPORT:
        return _export(arguments)
    if command == KEYS:
        return _keys(arguments)
    if command == TRACE:
        return _trace(arguments)
    if "--multirun" in arguments.flags:
        return _run_many(command, arguments)
    from .compose import compose_config

    config = compose_config(arguments.overrides)
    if arguments.show is not None:
        return _show(config, arguments.show, console)
    if command == "doctor":
        from amusd.commands.doctor import run_doctor

        return run_doctor(config, Console(json_only=config.output == "json"))
    if command == "bench":
        from .commands import run_bench

        return run_bench(config)
    if command == "simulate":
        from .commands import run_simulation

        return run_simulation(config)
    return _run_one(command, config, arguments.roles)


def _run_one(command: str, config: RunConfig, roles: str | None) -> int:
    """Have a pair of workers do `generate`, `compare` or `serve`, where there is anything left to do."""
    from amusd.workload import AnswersFile, prompts_of

    from .jobs import run_job

    if command == "serve":
        return run_job(command, with_api_key(config), roles=roles)
    if not prompts_of(command, config):  # what is wrong with them is said before any worker starts
        out = str(AnswersFile(config).path)
        tell(f"out={out}: all prompts are answered")
        Console(json_only=config.output == "json").document({"complete": True, "out": out, "num_prompts": 0})
        return 0
    if command == "generate" and config.out is not None:
        with AnswersFile(config).opened():
            pass  # it can be written, and no other run does
    return run_job(command, config, roles=roles)


def with_api_key(config: RunConfig) -> RunConfig:
    """The key from the environment, unless one is named. Raises `ConfigError` for the one of a run's `config.yaml`."""
    if config.serve.api_key == HIDDEN:
        raise ConfigError(f"serve.api_key={HIDDEN}: a run does not keep its key; name one, or null")
    key = config.serve.api_key or os.environ.get("AMUSD_API_KEY") or None
    return dataclasses.replace(config, serve=dataclasses.replace(config.serve, api_key=key))


def _show(config: RunConfig, what: str, console: Console) -> int:
    if what != "job":
        raise ConfigError(f"--cfg {what}: allowed: job; Hydra's own settings are not used")
    from .run_directory import config_text

    console.text(config_text(config), end="")
    return 0


def _export(arguments: Arguments) -> int:
    folder = _folder_alone(arguments, "PATH")
    from .commands import export_embedded_draft

    return export_embedded_draft(folder)


def _keys(arguments: Arguments) -> int:
    folder = _folder_alone(arguments, "FOLDER")
    from amusd.transport.curve import write_keys

    write_keys(folder)
    tell(f"keys: {folder}; each machine needs store.key_secret, its own role's .key_secret and the other role's .key")
    return 0


def _folder_alone(arguments: Arguments, name: str) -> Path:
    """The only argument of a command that writes a folder. Raises `ConfigError`."""
    if len(arguments.overrides) != 1 or "=" in arguments.overrides[0] or arguments.flags or arguments.show:
        command = arguments.command
        raise ConfigError(f"{command}: name the folder to write, and nothing else: amusd {command} {name}")
    return Path(arguments.overrides[0])


def _trace(arguments: Arguments) -> int:
    folders = [argument for argument in arguments.overrides if "=" not in argument]
    numbers = [argument.removeprefix("sequence=") for argument in arguments.overrides if "=" in argument]
    if (
        len(folders) != 1
        or len(numbers) > 1
        or arguments.flags
        or arguments.show
        or any("=" in number for number in numbers)
    ):
        raise ConfigError(f"{TRACE}: name the folder of a run, and nothing else: amusd {TRACE} RUN_DIR [sequence=N]")
    if numbers and not numbers[0].isdecimal():
        raise ConfigError(f"sequence={numbers[0]}: expected a whole number")
    folder = Path(folders[0])
    from amusd.commands.trace import trace

    return trace(folder, int(numbers[0]) if numbers else None)


def _run_many(command: str, arguments: Arguments) -> int:
    if command in ("doctor", "bench", "simulate", "serve"):
        raise ConfigError(f"-m: `amusd {command}` looks at one configuration; leave -m out")
    if arguments.show is not None:
        raise ConfigError(f"--cfg {arguments.show}: prints one configuration; leave -m out")
    from .sweep import run_sweep

    return run_sweep(command, arguments.overrides, roles=arguments.roles)


if __name__ == "__main__":
    sys.exit(main())
