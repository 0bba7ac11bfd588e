"""One job: its run directory, its pair of workers under torchrun, and what their end means for the exit code."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from amusd.config import RunConfig

from .devices import THREAD_VARIABLES
from .job import Options
from .process_tree import run_tree
from .run_directory import create_run_directory, discard_run
from .terminal import tell

_OF_AN_OUTER_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "PET_")


@dataclass(frozen=True, kw_only=True)
class JobOutcome:
    """How a job ended."""

    exit_code: int
    run_directory: Path
    interrupted: bool = False


def run_job(command: str, config: RunConfig, *, folder: Path | None = None, roles: str | None = None) -> JobOutcome:
    """Run one job to its end. Raises `ConfigError` when the run directory cannot be used."""
    directory = create_run_directory(config, folder)
    tell(f"run directory: {directory}")
    with tempfile.TemporaryDirectory(prefix="amusd-") as scratch:
        outcome_file = Path(scratch) / "exit_code"
        options = Options(run_directory=directory, command=command, outcome_file=outcome_file, roles=roles)
        ended = run_tree(_torchrun(options.arguments(), Path(scratch)), _environment(config))
        reported = int(outcome_file.read_text(encoding="utf-8")) if outcome_file.exists() else None
    if ended.signum is not None:
        tell(f"interrupted; what was measured so far is in {directory}")
        return JobOutcome(exit_code=128 + ended.signum, run_directory=directory, interrupted=True)
    if reported is None:
        tell(f"the workers ended without a result (torchrun: {ended.exit_code}); what they said is above")
        return JobOutcome(exit_code=ended.exit_code or 1, run_directory=directory)
    if reported == 2:
        discard_run(directory)
    return JobOutcome(exit_code=reported, run_directory=directory)


def _torchrun(arguments: Sequence[str], scratch: Path) -> list[str]:
    flags = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2", f"--log-dir={scratch}"]
    entry = str(Path(__file__).with_name("run.py"))
    return [sys.executable, "-m", "torch.distributed.run", *flags, entry, *arguments]


def _environment(config: RunConfig) -> dict[str, str]:
    """Ours, less what an outer torchrun left in it; threads as configured."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_AN_OUTER_TORCHRUN)}
    threads = {name: str(config.hardware.num_threads) for name in THREAD_VARIABLES}
    return {"TORCH_CPP_LOG_LEVEL": "ERROR"} | kept | threads
