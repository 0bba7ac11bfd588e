"""Runs parts as processes with a time limit. If one fails, hangs or is killed, the others lose nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from experiments.gpu_proof.plan import Part
from experiments.gpu_proof.records import DONE, FAILED, TIMED_OUT, Ending, write_ending

_REASON_LINES = 15
_REASON_BYTES = 4000


def run_part(part: Part, device: str, results: Path, environment: Mapping[str, str]) -> Ending:
    """Run one part to its end or its limit. Its earlier measurements are deleted."""
    (results / f"{part.name}.jsonl").unlink(missing_ok=True)
    shutil.rmtree(results / part.name, ignore_errors=True)
    command = [sys.executable, str(Path(__file__).with_name("part.py")), part.name, device, str(results)]
    ending = run_limited(part.name, command, part.limit(device), results / f"{part.name}.log", environment)
    write_ending(results, ending)
    return ending


def run_limited(
    name: str, command: Sequence[str], seconds: float, log: Path, environment: Mapping[str, str] | None = None
) -> Ending:
    """Run a command for at most `seconds`; all processes that it started end with it. Its output goes to `log`."""
    started = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
        )
        code: int | None
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):  # children of a part that failed may still be there
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    status = TIMED_OUT if code is None else DONE if code == 0 else FAILED
    reason = "" if status == DONE else _reason(log, code, seconds)
    return Ending(name, status, round(time.monotonic() - started, 1), code, reason)


def stream(command: Sequence[str], folder: Path, keep: Callable[[str], object]) -> int:
    """Run a command in `folder`; `keep` gets each line of its output as it is written. Returns the exit code."""
    with subprocess.Popen(
        list(command),
        cwd=folder,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            keep(line.rstrip("\n"))
    return process.returncode


def _reason(log: Path, code: int | None, seconds: float) -> str:
    how = f"killed after {seconds:g} seconds" if code is None else f"exit code {code}"
    if code is not None and code < 0:
        how = f"killed by signal {-code}"
    lines = log.read_bytes()[-_REASON_BYTES:].decode(errors="replace").splitlines()[-_REASON_LINES:]
    return "\n".join([how, *lines])
