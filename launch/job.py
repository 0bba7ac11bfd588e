"""What a worker has to do: its arguments, the group of jobs they lead to, and the function that does them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amusd.config import RunConfig, TransportConfig
from amusd.errors import ConfigError
from amusd.runtime.draft_restart import DraftSource
from amusd.transport.curve import read_store_key

from .group import Group, Job
from .run_directory import create_run_directory

COMMANDS = ("generate", "compare")
"""What a pair of workers can do."""
GROUP_FILE = "group.json"
"""What `amusd` has prepared for the target, which takes it away, in a folder that only this user can enter."""

_KEYS = "transport.keys="
TargetRole = Callable[
    [str, Sequence[tuple[RunConfig, Path]], DraftSource],
    Generator["int | ConfigError", None, None],
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `launch/run.py`."""

    group_file: Path | None = None
    """What `amusd` has prepared: this is the target of a pair on one machine. None when started by hand."""
    command: str = "generate"
    """By hand."""
    outcome_file: Path | None = None
    """Where the target tells `amusd` how its jobs went."""
    roles: str | None = None
    """A module with what the processes do in place of amusd's own functions (the launcher's tests)."""
    overrides: tuple[str, ...] = ()
    """By hand."""

    def arguments(self) -> list[str]:
        """The inverse of `parse`."""
        named = {
            "--group-file": self.group_file,
            "--outcome-file": self.outcome_file,
            "--roles": self.roles,
        }
        flags = [f"{flag}={value}" for flag, value in named.items() if value is not None]
        return [*flags, self.command, *self.overrides]

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Options:
        """Read the arguments. Raises `ConfigError` on what no rank can do."""
        values: dict[str, Any] = {}
        readers: dict[str, Callable[[str], Any]] = {
            "--group-file": Path,
            "--outcome-file": Path,
            "--roles": str,
        }
        rest = list(arguments)
        while rest and rest[0].partition("=")[0] in readers:
            flag, _, value = rest.pop(0).partition("=")
            values[flag[2:].replace("-", "_")] = readers[flag](value)
        if {"-m", "--multirun"} & set(rest):
            raise ConfigError("-m: a sweep starts its own pairs of workers; use `amusd compare -m ...`, not torchrun")
        if rest and "=" not in rest[0]:
            values["command"] = rest.pop(0)
            if values["command"] not in COMMANDS:
                raise ConfigError(f"{values['command']}: under torchrun the command is {' or '.join(COMMANDS)}")
        return cls(**values, overrides=tuple(rest))


def prepare_group(options: Options) -> Group:
    """The target's: take what `amusd` has prepared, or compose the arguments and make a run directory.

    Raises `ConfigError`.
    """
    if options.group_file is not None:
        group = Group.from_text(options.group_file.read_text(encoding="utf-8"))
        options.group_file.unlink()
        return group
    from .compose import compose_config

    config = compose_config(options.overrides)
    return Group(command=options.command, jobs=(Job(config=config, run_directory=create_run_directory(config)),))


def own_transport(options: Options) -> TransportConfig:
    """What this worker's own arguments say of the link, started by hand. Raises `ConfigError`."""
    from .compose import compose_config

    return compose_config(options.overrides).transport


def store_secret(options: Options) -> bytes:
    """What this worker seals with, from `transport.keys`; empty without. Raises `ConfigError`."""
    # not composed: a rank whose arguments are wrong still has to tell the other one
    folders = [text.removeprefix(_KEYS) for text in options.overrides if text.startswith(_KEYS)]
    return read_store_key(Path(folders[-1])) if folders else b""


def target_role(module: str | None) -> TargetRole:
    """The function that is the target."""
    role: TargetRole = importlib.import_module(module or "amusd.commands.run").run_target
    return role
