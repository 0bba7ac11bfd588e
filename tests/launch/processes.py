"""Runs the launcher as a user does: as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.warm import ROOT, Popen

SECONDS = 240.0
WAITING = ("policy=chain", "min_candidates=2", "max_wait_passes=10000", "max_silence_seconds=60")


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def assert_gone(processes: Sequence[psutil.Process]) -> None:
    _, left = psutil.wait_procs(processes, 10.0)
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **variables}


def amusd_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "launch.main", *arguments]


ONE_NODE = ("--standalone", "--local-addr=127.0.0.1")


def torchrun_command(*arguments: str, num_processes: int = 2, flags: Sequence[str] = ONE_NODE) -> list[str]:
    program = [f"--nproc-per-node={num_processes}", str(ROOT / "launch" / "run.py")]
    return [sys.executable, "-m", "torch.distributed.run", *flags, *program, *arguments]


def run(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    pipe = subprocess.PIPE
    with Popen(command, cwd=folder, env=environment(**variables), stdout=pipe, stderr=pipe, text=True) as process:
        try:
            out, err = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, err)
