"""What a rank has to do: its arguments, and the job that both ranks share."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amusd.config import RunConfig, from_mapping, to_mapping
from amusd.errors import ConfigError
from amusd.transport.base import Rendezvous

from .run_directory import create_run_directory, read_config

COMMANDS = ("generate", "compare")
"""What a pair of workers can do."""

TargetRole = Callable[[str, RunConfig, Path, Callable[[Rendezvous], None]], int]
DraftRole = Callable[[RunConfig, "Path | None", Callable[[], Rendezvous], int], int]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `launch/run.py`."""

    run_directory: Path | None = None
    """Made and filled by `amusd`; None when started by hand."""
    command: str = "generate"
    outcome_file: Path | None = None
    """Where rank 0 leaves its exit code for `amusd`; with it, ranks exit with 0 and torchrun stays silent."""
    roles: str | None = None
    """A module with `run_target` and `run_draft` in place of amusd's own (the launcher's tests)."""
    incarnation: int | None = None
    """Set in the process that drafts: which life of the draft it is."""
    overrides: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """The inverse of `parse`."""
        named = {
            "--run-directory": self.run_directory,
            "--outcome-file": self.outcome_file,
            "--roles": self.roles,
            "--incarnation": self.incarnation,
        }
        flags = [f"{flag}={value}" for flag, value in named.items() if value is not None]
        return [*flags, self.command, *self.overrides]

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Options:
        """Read the arguments. Raises `ConfigError` on what no rank can do."""
        values: dict[str, Any] = {}
        readers: dict[str, Callable[[str], Any]] = {
            "--run-directory": Path,
            "--outcome-file": Path,
            "--roles": str,
            "--incarnation": int,
        }
        rest = list(arguments)
        while rest and rest[0].partition("=")[0] in readers:
            flag, _, value = rest.pop(0).partition("=")
            values[flag[2:].replace("-", "_")] = readers[flag](value)
        if {"-m", "--multirun"} & set(rest):
            raise ConfigError("-m: a sweep starts a pair of workers per job; use `amusd compare -m ...`, not torchrun")
        if rest and "=" not in rest[0]:
            values["command"] = rest.pop(0)
            if values["command"] not in COMMANDS:
                raise ConfigError(f"{values['command']}: under torchrun the command is {' or '.join(COMMANDS)}")
        return cls(**values, overrides=tuple(rest))


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run, as both ranks know it."""

    command: str
    config: RunConfig
    run_directory: Path

    @classmethod
    def prepare(cls, options: Options) -> Job:
        """Read the run directory that `amusd` made, or compose the arguments and make one. Raises `ConfigError`."""
        if options.run_directory is not None:
            config = read_config(options.run_directory)
            return cls(command=options.command, config=config, run_directory=options.run_directory)
        from .compose import compose_config

        config = compose_config(options.overrides)
        return cls(command=options.command, config=config, run_directory=create_run_directory(config))

    def to_text(self) -> str:
        """For the other rank."""
        values = {"command": self.command, "config": to_mapping(self.config), "run_directory": str(self.run_directory)}
        return json.dumps(values)

    @classmethod
    def from_text(cls, text: str) -> Job:
        """The inverse of `to_text`."""
        values = json.loads(text)
        return cls(
            command=values["command"],
            config=from_mapping(RunConfig, values["config"]),
            run_directory=Path(values["run_directory"]),
        )


def target_role(module: str | None) -> TargetRole:
    """The function that is the target."""
    role: TargetRole = importlib.import_module(module or "amusd.cli").run_target
    return role


def draft_role(module: str | None) -> DraftRole:
    """The function that is the draft."""
    role: DraftRole = importlib.import_module(module or "amusd.runtime.startup").run_draft
    return role
