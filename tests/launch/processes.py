"""Runs the launcher as a user does: as a process of its own."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.warm import ROOT, Popen

SECONDS = 240.0
PATIENT = "max_silence_seconds=60"
WAITING = ("policy=branching", "min_candidates=2", "max_wait_passes=10000", PATIENT)
BLOCKS = ("mode=synchronous", "num_speculative_tokens=3", PATIENT)
ROOM = 16


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def assert_gone(processes: Sequence[psutil.Process]) -> None:
    _, left = psutil.wait_procs(processes, SECONDS)
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


@contextmanager
def begun(command: list[str], folder: Path, **variables: str) -> Iterator[subprocess.Popen[Any]]:
    """A process whose answer has begun, and which cannot end until its standard output is read.

    That is a `full_pipe`.
    """
    out, into, filling = full_pipe()
    pipe = subprocess.PIPE
    process = Popen(
        command, cwd=folder, env=environment(**variables), stdout=into, stderr=pipe, bufsize=0, start_new_session=True
    )
    os.close(into)
    process.stdout = os.fdopen(out, "rb", buffering=0)
    with process:
        try:
            while num_in(out) == filling:
                assert process.poll() is None, process.communicate()[1]
                time.sleep(0.01)
            process.stdout.read(filling)
            yield process
        finally:
            process.kill()


def full_pipe() -> tuple[int, int, int]:
    """Both ends of a pipe with room for a few bytes, and how many are in it; all of them must be read to make room."""
    out, into = os.pipe()
    return out, into, os.write(into, bytes(fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, 1) - ROOM))


def num_in(pipe: int) -> int:
    (number,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
    return int(number)


def free_port() -> int:
    """A free port of loopback below those that systems give to connections by themselves."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", 20_000 + secrets.randbelow(9_000)))
            return int(probe.getsockname()[1])
