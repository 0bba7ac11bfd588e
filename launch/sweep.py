"""A sweep: jobs that share what can be shared, in numbered folders, and one summary at the end.

An interrupted sweep goes on when the same command is given again with its folder as `run_dir`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from amusd.console import Console, progress_line, tell
from amusd.errors import ConfigError

from .environment import describe_environment
from .job import Group, Job
from .jobs import run_group
from .run_directory import clear_run, create_run_directory
from .sweep_plan import Plan, SweepJob, groups_of, is_done, open_folder, plan_sweep
from .sweep_summary import Summary, summarize, write_summary


def run_sweep(command: str, arguments: Sequence[str], *, roles: str | None = None) -> int:
    """Run every job that is not done yet; return 0, or the exit code of the first that failed.

    A job that fails does not stop the others; an interruption does. Raises `ConfigError` before the first job for a
    mistake in any, and for a folder that cannot be used.
    """
    plan = plan_sweep(command, arguments)
    folder = open_folder(plan)
    sweep = _Sweep(plan, folder, roles)
    tell(f"{len(plan.jobs)} jobs in {folder}{sweep.head_start()}")
    signum = sweep.run()
    summary = sweep.save(complete=True)
    if signum is not None:
        tell(f"interrupted; the same command with run_dir={folder} goes on from here")
        return 128 + signum
    tell(f"{len(plan.jobs)} jobs in {folder}; done in {time.monotonic() - sweep.began:.0f} s")
    console = Console(json_only=plan.jobs[0].config.output == "json")
    console.text(summary.table())
    console.document(summary.document())
    return next((code for _, code in sorted(sweep.exit_codes.items()) if code), 0)


class _Sweep:
    """The jobs of a plan on their way."""

    def __init__(self, plan: Plan, folder: Path, roles: str | None) -> None:
        self.plan = plan
        self.folder = folder
        self.roles = roles
        self.began = time.monotonic()
        self.exit_codes = {job.number: 0 for job in plan.jobs if is_done(job, self._directory(job))}
        self._num_earlier = len(self.exit_codes)

    def head_start(self) -> str:
        """Words about what an earlier attempt has left, for the first line."""
        return f", {self._num_earlier} of them done before" if self._num_earlier else ""

    def run(self) -> int | None:
        """All jobs that are left, group by group. Returns the signal that interrupted them, if one did."""
        self.save()
        for group in groups_of(self.plan.command, [job for job in self.plan.jobs if job.number not in self.exit_codes]):
            left = group
            while left:
                left, signum = self._run_group(left)
                self.save()
                if signum is not None:
                    return signum
        return None

    def save(self, *, complete: bool = False) -> Summary:
        """Write what is known; `complete`: with the table and the page, for which a job in between need not wait."""
        summary = summarize(self.plan, self.folder, self.exit_codes)
        write_summary(summary, complete=complete)
        return summary

    def _run_group(self, jobs: Sequence[SweepJob]) -> tuple[list[SweepJob], int | None]:
        """Run jobs with one pair of workers; return those that it did not come to, and the signal that ended it."""
        ready = self._prepare(jobs)
        if not ready:
            return [], None
        group = Group(command=self.plan.command, jobs=tuple(ready.values()))
        codes, signum = run_group(group, roles=self.roles, json_only=group.config.output == "json")
        self.exit_codes.update(zip(ready, codes, strict=False))
        return [job for job in jobs if job.number not in self.exit_codes], signum

    def _prepare(self, jobs: Sequence[SweepJob]) -> dict[int, Job]:
        """Make the directories, by number; one that cannot be made is that job's failure."""
        environment = describe_environment()
        ready = {}
        for job in jobs:
            directory = self._directory(job)
            try:
                clear_run(directory)
                create_run_directory(job.config, directory, environment)
            except (ConfigError, OSError) as error:
                tell(f"job {job.number}: {error}")
                self.exit_codes[job.number] = 2
                continue
            config = dataclasses.replace(job.config, run_dir=str(directory))
            title = progress_line(job.title, len(self.exit_codes) + len(ready), len(self.plan.jobs))
            ready[job.number] = Job(config=config, run_directory=directory, title=title)
        return ready

    def _directory(self, job: SweepJob) -> Path:
        return self.folder / str(job.number)
