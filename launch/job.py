"""What a rank has to do: its arguments, the group of jobs they lead to, and the functions that do them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amusd.config import RunConfig, TransportConfig
from amusd.errors import ConfigError
from amusd.runtime.draft_restart import DraftSource
from amusd.runtime.rank_layout import RoleRank
from amusd.transport.curve import read_store_key

from .group import Group, Job
from .run_directory import create_run_directory

COMMANDS = ("generate", "compare")
"""What a pair of workers can do."""
GROUP_FILE = "group.json"
"""What `amusd` has prepared for the ranks, without prompts, in a folder that only this user can enter."""
PROMPTS_FILE = "prompts.json"
"""Beside it: the same with the prompts, for the target alone, which takes it away."""
SEAL_FILE = "seal"
"""Beside it: what the workers seal with."""

_KEYS = "transport.keys="
TargetRole = Callable[
    [str, Sequence[tuple[RunConfig, Path]], DraftSource],
    Generator["int | ConfigError", None, None],
]
FollowerRole = Callable[[str, RunConfig, RoleRank, str], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `launch/run.py`."""

    group_file: Path | None = None
    """What `amusd` has prepared; None when started by hand."""
    command: str = "generate"
    """By hand."""
    outcome_file: Path | None = None
    """Where the first rank tells its launcher how it went; with it, ranks exit with 0 and torchrun stays silent."""
    roles: str | None = None
    """A module with `run_target`, `run_follower` and `run_draft` in place of amusd's own (the launcher's tests)."""
    starts_draft: bool = False
    """This is the target of a pair on one machine, and no rank: it starts the draft."""
    is_child: bool = False
    """This is the process that does a rank's work, or that forks those which do; its parent is on standard input."""
    overrides: tuple[str, ...] = ()
    """By hand."""

    def arguments(self) -> list[str]:
        """The inverse of `parse`."""
        named = {
            "--group-file": self.group_file,
            "--outcome-file": self.outcome_file,
            "--roles": self.roles,
            "--starts-draft": "yes" if self.starts_draft else None,
            "--is-child": "yes" if self.is_child else None,
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
            "--starts-draft": lambda text: text == "yes",
            "--is-child": lambda text: text == "yes",
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


def read_group(group_file: Path) -> Group:
    """What `amusd` has prepared, without prompts."""
    return Group.from_text(group_file.read_text(encoding="utf-8"))


def prepare_group(options: Options) -> Group:
    """The target's: take what `amusd` has prepared, or compose the arguments and make a run directory.

    Raises `ConfigError`.
    """
    if options.group_file is not None:
        prompts_file = options.group_file.with_name(PROMPTS_FILE)
        group = read_group(prompts_file)
        prompts_file.unlink()
        return group
    from .compose import compose_config

    config = compose_config(options.overrides)
    return Group(command=options.command, jobs=(Job(config=config, run_directory=create_run_directory(config)),))


def own_transport(options: Options) -> TransportConfig:
    """What this worker's own arguments say of the link, started by hand. Raises `ConfigError`."""
    from .compose import compose_config

    return compose_config(options.overrides).transport


def store_secret(options: Options) -> bytes:
    """What this worker seals with: from the launcher's private folder, or from `transport.keys`; empty without either.

    Raises `ConfigError`.
    """
    if options.group_file is not None:
        return options.group_file.with_name(SEAL_FILE).read_bytes()
    # not composed: a rank whose arguments are wrong still has to tell the other one
    folders = [text.removeprefix(_KEYS) for text in options.overrides if text.startswith(_KEYS)]
    return read_store_key(Path(folders[-1])) if folders else b""


def target_role(module: str | None) -> TargetRole:
    """The function that is the target."""
    role: TargetRole = importlib.import_module(module or "amusd.commands.run").run_target
    return role


def follower_role(module: str | None) -> FollowerRole:
    """The function that is another rank of a role than the first."""
    role: FollowerRole = importlib.import_module(module or "amusd.runtime.startup").run_follower
    return role
