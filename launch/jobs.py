"""A group of jobs: the workers that do them, and what their end means for the exit code of each.

A pair of two processes is started as `Engine.launch` does: the target here, which starts its draft. Where a role has
several ranks, torchrun starts them.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from amusd.config import RunConfig
from amusd.files import write_whole

from .devices import NCCL_SETTINGS, THREAD_VARIABLES
from .group import Group, Job
from .job import GROUP_FILE, PROMPTS_FILE, SEAL_FILE, Options
from .process_tree import END_SECONDS, Ended, run_tree
from .run_directory import PARTIAL_FILE, create_run_directory, discard_run
from .scratch import Outcome, read_outcome, scratch_folder
from .terminal import tell

_OF_AN_OUTER_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "PET_")


@dataclass(frozen=True, kw_only=True)
class GroupOutcome:
    """How a group ended."""

    exit_codes: tuple[int, ...]
    """Of its first jobs, at least one. The others were not begun: their pair of workers ended before."""
    signum: int | None = None
    """The signal that interrupted it."""


def run_job(command: str, config: RunConfig, *, roles: str | None = None) -> int:
    """Run one job to its end; return its exit code. Raises `ConfigError` when the run directory cannot be used."""
    directory = create_run_directory(config)
    tell(f"run directory: {directory}")
    outcome = run_group(Group(command=command, jobs=(Job(config=config, run_directory=directory),)), roles=roles)
    if outcome.signum is not None:
        tell(f"interrupted; what was measured so far is in {directory}")
        return 128 + outcome.signum
    return outcome.exit_codes[0]


def run_group(group: Group, *, roles: str | None = None, json_only: bool = False) -> GroupOutcome:
    """Run the jobs, whose directories are made, with one pair of workers, until the last ends or the pair does.

    A directory in which nothing was measured is taken back. `json_only` keeps the workers off standard output.
    """
    with scratch_folder() as folder:
        group_file, outcome_file = folder / GROUP_FILE, folder / "outcome"
        is_pair = group.config.engine().num_ranks == 2
        options = Options(
            group_file=group_file,
            command=group.command,
            outcome_file=outcome_file,
            roles=roles,
            starts_draft=is_pair,
        )
        write_whole(folder / PROMPTS_FILE, group.to_text())
        if not is_pair:
            write_whole(group_file, group.without_prompts().to_text())
            (folder / SEAL_FILE).write_bytes(secrets.token_bytes(32))
        ended = run_tree(
            _command(group.config, options, folder),
            _environment(group.config),
            lambda: read_outcome(outcome_file).is_whole(len(group.jobs)),
            quiet=json_only,
            asks_root=is_pair,
        )
        told = read_outcome(outcome_file)
    if ended.stuck:
        pids = ", ".join(map(str, ended.stuck))
        tell(f"processes that had not ended {END_SECONDS:g} s after the result were killed (pid {pids})")
    if ended.signum is None and not told.is_whole(len(group.jobs)):
        if is_pair and ended.exit_code == -signal.SIGALRM:
            tell("the target's process was asked to end, and took too long")
        elif is_pair and ended.exit_code < 0:
            tell(f"the target's process was killed by {signal.Signals(-ended.exit_code).name}")
        who = "the workers" if is_pair else f"torchrun (exit code {ended.exit_code})"
        tell(f"{who} ended without a result; what they said is above")
        for partial in (job.run_directory / PARTIAL_FILE for job in group.jobs):
            if partial.exists():
                tell(f"what there was of the answer is in {partial}")
    elif ended.signum is None and not ended.stuck and (told.exit_code or 0) > 128:
        how = "torchrun was killed" if ended.exit_code < 0 else "the workers were interrupted"
        tell(f"{how}; what was measured so far is in {group.folder}")
    codes = _exit_codes(ended, told, len(group.jobs))
    for job, code in zip(group.jobs, [*codes, *[None] * (len(group.jobs) - len(codes))], strict=True):
        if code in (2, None):
            discard_run(job.run_directory)
    return GroupOutcome(exit_codes=codes, signum=ended.signum)


def _exit_codes(ended: Ended, told: Outcome, num_jobs: int) -> tuple[int, ...]:
    """Those that were told, and what the end of the workers means for the job that they were at."""
    codes = told.job_codes
    num_left = num_jobs - len(codes)
    if num_left == 0:
        return codes
    if ended.signum is not None:
        return (*codes, 128 + ended.signum)
    if told.exit_code == 2 and 2 not in codes:  # what no job could work with
        return (*codes, *[2] * num_left)
    if told.num_begun > len(codes) or not codes:
        return (*codes, told.exit_code or max(ended.exit_code, 1))
    return codes


def _command(config: RunConfig, options: Options, scratch: Path) -> list[str]:
    agent, entry = (str(Path(__file__).with_name(name)) for name in ("agent.py", "run.py"))
    if options.starts_draft:
        return [sys.executable, entry, *options.arguments()]
    flags = ["--nnodes=1", f"--nproc-per-node={config.engine().num_ranks}", f"--log-dir={scratch}"]
    rendezvous = ["--rdzv-backend=amusd", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    return [sys.executable, agent, *flags, *rendezvous, entry, *options.arguments()]


def _environment(config: RunConfig) -> dict[str, str]:
    """Ours, less what an outer torchrun left in it; threads as configured, and NCCL's settings where it is the link."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_AN_OUTER_TORCHRUN)}
    threads = {name: str(config.hardware.num_threads) for name in THREAD_VARIABLES}
    nccl = NCCL_SETTINGS if config.transport.kind == "nccl" else {}
    return {"TORCH_CPP_LOG_LEVEL": "ERROR"} | kept | threads | nccl
