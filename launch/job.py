"""Jobs that one pair of workers does, one after another, and the arguments of the process that leads them.

A run has one job. A sweep has many, and those whose engines are alike share a pair, which loads its models once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amusd.config import RunConfig
from amusd.errors import ConfigError
from amusd.settings import from_mapping, to_mapping
from amusd.transport.curve import read_store_key

from .run_directory import create_run_directory

COMMANDS = ("generate", "compare", "serve")
"""Commands for a pair of workers."""
GROUP_FILE = "group.json"
"""What `amusd` has prepared for the target, which takes it away, in a folder that only this user can enter."""
OUTCOME_FILE = "outcome"
"""Beside it: how the target's jobs went, for `amusd`."""
DRAIN_SECONDS = 10.0
"""What a server has to end by itself, besides `serve.shutdown_seconds`."""
_KEYS = "transport.keys="


@dataclass(frozen=True, kw_only=True)
class Job:
    """One configuration, and the directory that its files go to."""

    config: RunConfig
    run_directory: Path
    title: str = ""
    """The line that says how far its sweep is when it starts; empty: it is not part of a sweep."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The work of a pair of workers."""

    command: str
    jobs: tuple[Job, ...]
    """At least one; their engines are alike."""

    @property
    def config(self) -> RunConfig:
        """What is said here of models, link and devices holds for all jobs."""
        return self.jobs[0].config

    @property
    def folder(self) -> Path:
        """The folder of its results: that of its job, or of its sweep."""
        directory = self.jobs[0].run_directory
        return directory.parent if self.jobs[0].title else directory

    def on(self, settled: RunConfig) -> Group:
        """The same jobs with the devices of a configuration in which they are settled."""
        jobs = (
            dataclasses.replace(job, config=dataclasses.replace(job.config, hardware=settled.hardware))
            for job in self.jobs
        )
        return dataclasses.replace(self, jobs=tuple(jobs))

    def without_prompts(self) -> Group:
        """What the draft is told before there is a link; prompts reach it over the link, as tokens."""
        jobs = (
            dataclasses.replace(job, config=dataclasses.replace(job.config.without_secrets(), prompt=None))
            for job in self.jobs
        )
        return dataclasses.replace(self, jobs=tuple(jobs))

    @property
    def drain_seconds(self) -> float:
        """How long the target takes to end after the first signal that asks it to; 0: it ends at once."""
        return self.config.serve.shutdown_seconds + DRAIN_SECONDS if self.command == "serve" else 0.0

    def to_text(self) -> str:
        """Return it as text, for the ranks."""
        jobs = [
            {"config": to_mapping(job.config), "run_directory": str(job.run_directory), "title": job.title}
            for job in self.jobs
        ]
        return json.dumps({"command": self.command, "jobs": jobs})

    @classmethod
    def from_text(cls, text: str) -> Group:
        """The inverse of `to_text`."""
        values = json.loads(text)
        jobs = (
            Job(
                config=from_mapping(RunConfig, job["config"]),
                run_directory=Path(job["run_directory"]),
                title=job["title"],
            )
            for job in values["jobs"]
        )
        return cls(command=values["command"], jobs=tuple(jobs))


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `launch/run.py`."""

    group_file: Path | None = None
    """What `amusd` has prepared: this is the target of a pair on one machine. None when started by hand."""
    command: str = "generate"
    """By hand."""
    roles: str | None = None
    """A module with what the processes do in place of amusd's own functions (the launcher's tests)."""
    overrides: tuple[str, ...] = ()
    """By hand."""

    @property
    def outcome_file(self) -> Path | None:
        """The file in which the target tells how its jobs went; None if it is not asked for."""
        return None if self.group_file is None else self.group_file.with_name(OUTCOME_FILE)

    def arguments(self) -> list[str]:
        """The inverse of `parse`."""
        named = {"--group-file": self.group_file, "--roles": self.roles}
        flags = [f"{flag}={value}" for flag, value in named.items() if value is not None]
        return [*flags, self.command, *self.overrides]

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Options:
        """Read the arguments. Raises `ConfigError` on what no rank can do."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--group-file", type=Path)
        parser.add_argument("--roles")
        named, rest = parser.parse_known_args(arguments)
        values: dict[str, Any] = vars(named)
        if {"-m", "--multirun"} & set(rest):
            raise ConfigError("-m: a sweep starts its own pairs of workers; use `amusd compare -m ...`, not torchrun")
        if rest and "=" not in rest[0]:
            values["command"] = rest.pop(0)
            if values["command"] not in COMMANDS:
                raise ConfigError(f"{values['command']}: under torchrun the command is one of {', '.join(COMMANDS)}")
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
    job = Job(config=config, run_directory=create_run_directory(config))
    return Group(command=options.command, jobs=(job,))


def store_secret(options: Options) -> bytes:
    """What this worker seals with, from `transport.keys`; empty without. Raises `ConfigError`."""
    # not composed: a rank whose arguments are wrong still has to tell the other one
    folders = [text.removeprefix(_KEYS) for text in options.overrides if text.startswith(_KEYS)]
    return read_store_key(Path(folders[-1])) if folders else b""
