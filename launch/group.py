"""Jobs that one pair of workers does, one after another: all ranks know them from the start.

A run has one job. A sweep has many, and those whose engines are alike share a pair, which loads its models once.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from amusd.config import HardwareConfig, RunConfig
from amusd.console import progress_line
from amusd.settings import from_mapping, to_mapping


@dataclass(frozen=True, kw_only=True)
class Job:
    """One configuration, and the directory that its files go to."""

    config: RunConfig
    run_directory: Path
    title: str = ""
    """What tells it from the other jobs of its sweep."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How far a sweep was when the group started."""

    num_jobs: int
    num_done: int
    """Jobs that have ended, those of an earlier attempt included."""
    num_timed: int
    """Of these, jobs that ended since `began`: what the time left is judged by."""
    began: float
    """`time.monotonic()` of the sweep's first job, one clock for all processes of a machine."""

    def line(self, title: str, num_more: int, now: float) -> str:
        """The progress line of the job that starts now, `num_more` jobs later."""
        timed = self.num_timed + num_more
        left = self.num_jobs - self.num_done - num_more
        label = f"{title}; about {duration((now - self.began) / timed * left)} left" if timed else title
        return progress_line(label, self.num_done + num_more, self.num_jobs)


@dataclass(frozen=True, kw_only=True)
class Group:
    """What a pair of workers has to do."""

    command: str
    jobs: tuple[Job, ...]
    """At least one; their engines are alike."""
    standing: Standing | None = None
    """None: the job is not part of a sweep."""

    @property
    def config(self) -> RunConfig:
        """What is said here of models, link and devices holds for all jobs."""
        return self.jobs[0].config

    @property
    def folder(self) -> Path:
        """Where its results are: the folder of its job, or of its sweep."""
        directory = self.jobs[0].run_directory
        return directory if self.standing is None else directory.parent

    def on(self, hardware: HardwareConfig) -> Group:
        """The same jobs with the devices named that they run on."""
        jobs = (
            dataclasses.replace(job, config=dataclasses.replace(job.config, hardware=hardware)) for job in self.jobs
        )
        return dataclasses.replace(self, jobs=tuple(jobs))

    def without_prompts(self) -> Group:
        """What the draft is told before there is a link; prompts reach it over the link, as tokens."""
        jobs = (dataclasses.replace(job, config=dataclasses.replace(job.config, prompt=None)) for job in self.jobs)
        return dataclasses.replace(self, jobs=tuple(jobs))

    def to_text(self) -> str:
        """For the ranks."""
        jobs = [
            {"config": to_mapping(job.config), "run_directory": str(job.run_directory), "title": job.title}
            for job in self.jobs
        ]
        standing = None if self.standing is None else dataclasses.asdict(self.standing)
        return json.dumps({"command": self.command, "jobs": jobs, "standing": standing})

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
        standing = None if values["standing"] is None else Standing(**values["standing"])
        return cls(command=values["command"], jobs=tuple(jobs), standing=standing)


def duration(seconds: float) -> str:
    """`40 s`, `3 min`, `2 h 5 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
