"""A group of jobs: the workers that do them, and what their end means for the exit code of each.

The target is started here. It starts its draft, as from Python, and its own other ranks.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from amusd.config import RunConfig
from amusd.console import tell
from amusd.files import PARTIAL_FILE, write_whole

from .devices import NCCL_SETTINGS, THREAD_VARIABLES
from .job import GROUP_FILE, OUTCOME_FILE, Group, Job, Options
from .process_tree import END_SECONDS, Ended, run_tree
from .run_directory import create_run_directory, discard_run
from .scratch import Outcome, read_outcome, scratch_folder

_OF_AN_OUTER_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "PET_")


def run_job(command: str, config: RunConfig, *, roles: str | None = None) -> int:
    """Run one job to its end; return its exit code. Raises `ConfigError` when the run directory cannot be used."""
    directory = create_run_directory(config)
    tell(f"run directory: {directory}")
    codes, signum = run_group(Group(command=command, jobs=(Job(config=config, run_directory=directory),)), roles=roles)
    if signum is not None:
        tell("interrupted" if command == "serve" else f"interrupted; what was measured so far is in {directory}")
        return 128 + signum
    return codes[0]


def run_group(group: Group, *, roles: str | None = None, json_only: bool = False) -> tuple[tuple[int, ...], int | None]:
    """Run the jobs, whose directories are made, with one pair of workers, until the last ends or the pair does.

    Returns the exit codes of the first jobs, at least one (the others were not begun: their pair of workers ended
    before), and the signal that interrupted the group.

    A directory in which nothing was measured is taken back. `json_only` keeps the workers off standard output.
    """
    with scratch_folder() as folder:
        options = Options(group_file=folder / GROUP_FILE, command=group.command, roles=roles)
        outcome_file = folder / OUTCOME_FILE
        write_whole(folder / GROUP_FILE, group.to_text())
        ended = run_tree(
            [sys.executable, str(Path(__file__).with_name("run.py")), *options.arguments()],
            _environment(group.config),
            lambda: read_outcome(outcome_file).is_whole(len(group.jobs)),
            quiet=json_only,
            drain_seconds=group.drain_seconds,
        )
        told = read_outcome(outcome_file)
    if ended.stuck:
        pids = ", ".join(map(str, ended.stuck))
        tell(f"processes that had not ended {END_SECONDS:g} s after the result were killed (pid {pids})")
    if ended.signum is None and not told.is_whole(len(group.jobs)):
        if ended.exit_code == -signal.SIGALRM:
            tell("the target's process was asked to end, and took too long")
        elif ended.exit_code < 0:
            tell(f"the target's process was killed by {signal.Signals(-ended.exit_code).name}")
        tell("the workers ended without a result; what they said is above")
        for partial in (job.run_directory / PARTIAL_FILE for job in group.jobs):
            if partial.exists():
                tell(f"what there was of the answer is in {partial}")
    elif ended.signum is None and not ended.stuck and (told.exit_code or 0) > 128:
        tell(f"the workers were interrupted; what was measured so far is in {group.folder}")
    codes = _exit_codes(ended, told, len(group.jobs))
    for job, code in zip(group.jobs, [*codes, *[None] * (len(group.jobs) - len(codes))], strict=True):
        if code in (2, None):
            discard_run(job.run_directory)
    return codes, ended.signum


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


def _environment(config: RunConfig) -> dict[str, str]:
    """Ours, less what an outer torchrun left in it; threads as configured, and NCCL's settings where it may be used."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_AN_OUTER_TORCHRUN)}
    threads = {name: str(config.hardware.num_threads) for name in THREAD_VARIABLES}
    nccl = NCCL_SETTINGS if config.transport.kind == "nccl" or config.engine().num_ranks > 2 else {}
    return {"TORCH_CPP_LOG_LEVEL": "ERROR"} | kept | threads | nccl
