"""Which jobs a sweep has, which of them share a pair of workers, and which an earlier attempt has already done."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amusd.config import RunConfig
from amusd.errors import ConfigError
from amusd.workload import prompts_of

from .compose import compose_config
from .overrides import expand_sweep, split
from .run_directory import CONFIG_FILE, RESULT_FILE, SUMMARY_FILE, choose_folder, claim_folder, read_config

_NOT_MEASURED = ("run_dir", "output")
"""Keys that say where results go, not what they are."""


@dataclass(frozen=True, kw_only=True)
class SweepJob:
    """One point of a sweep."""

    number: int
    overrides: tuple[str, ...]
    swept: dict[str, str]
    """The keys that differ between jobs, and this job's values, as typed."""
    config: RunConfig

    @property
    def title(self) -> str:
        """For people."""
        values = " ".join(f"{key}={value}" for key, value in self.swept.items())
        return f"job {self.number}: {values}" if values else f"job {self.number}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A sweep before anything of it has run."""

    command: str
    arguments: tuple[str, ...]
    """As typed."""
    jobs: tuple[SweepJob, ...]

    @property
    def swept_keys(self) -> tuple[str, ...]:
        """The keys in the order in which they were typed."""
        return tuple(self.jobs[0].swept)


def plan_sweep(command: str, arguments: Sequence[str]) -> Plan:
    """Compose every job, so that a mistake in the last is found before the first runs. Raises `ConfigError`."""
    expanded = expand_sweep(arguments)
    values = [dict(split(override) for override in job) for job in expanded]  # the last of a key holds
    swept = [key for key in values[0] if len({job[key] for job in values}) > 1]
    if "run_dir" in swept:
        raise ConfigError("run_dir: cannot be swept; the jobs of a sweep are numbered inside one folder")
    jobs = (
        SweepJob(
            number=number,
            overrides=tuple(f"{key}={value}" for key, value in values[number].items() if key not in _NOT_MEASURED),
            swept={key: values[number][key] for key in swept},
            config=_checked(command, compose_config(job)),
        )
        for number, job in enumerate(expanded)
    )
    return Plan(command=command, arguments=tuple(arguments), jobs=tuple(jobs))


def _checked(command: str, config: RunConfig) -> RunConfig:
    """The configuration, whose prompts can be read. Raises `ConfigError`."""
    prompts_of(command, config)
    return config


def open_folder(plan: Plan) -> Path:
    """The folder of the sweep: a new one, or that of an earlier attempt at it. Raises `ConfigError` for any other."""
    folder = choose_folder(plan.jobs[0].config)
    if not (folder / SUMMARY_FILE).exists():
        return claim_folder(folder)
    try:
        earlier = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
        same = earlier["command"] == plan.command and [tuple(job["overrides"]) for job in earlier["jobs"]] == [
            job.overrides for job in plan.jobs
        ]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"run_dir={folder}: {SUMMARY_FILE} cannot be read; name another folder") from None
    if not same:
        raise ConfigError(
            f"run_dir={folder}: already holds another sweep; the command that began it goes on with it, "
            "any other needs another folder"
        )
    return folder.absolute()


def is_done(job: SweepJob, directory: Path) -> bool:
    """Whether an earlier attempt has measured the whole job. Raises `ConfigError` if with other settings."""
    result = read_result(directory)
    # What was measured while a draft was lost is plain decoding.
    if not result or not result.get("complete", True) or {"draft_failure", "draft_losses"} & result.keys():
        return False
    if not (directory / CONFIG_FILE).exists() or _resolved(read_config(directory)) != _resolved(job.config):
        raise ConfigError(
            f"run_dir={directory.parent}: job {job.number} was measured with other settings "
            f"({job.number}/{CONFIG_FILE}); name another folder"
        )
    return True


def read_result(directory: Path) -> dict[str, Any]:
    """The result that the job left; empty when it did not come that far."""
    path = directory / RESULT_FILE
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return result


def groups_of(command: str, jobs: Sequence[SweepJob]) -> list[list[SweepJob]]:
    """Jobs that can share a pair of workers, together: those for which it loads the same models in the same way."""
    groups: list[list[SweepJob]] = []
    for job in jobs:
        engine = job.config.engine_for(command)
        alike = (group for group in groups if group[0].config.engine_for(command) == engine)
        group = next(alike, None)
        if group is None:
            groups.append([job])
        else:
            group.append(job)
    return groups


def _resolved(config: RunConfig) -> RunConfig:
    return dataclasses.replace(config, run_dir=None, output="text")
