"""Target and draft as two processes on one device, each at work without a pause: time-sliced, and under MPS.

MPS is NVIDIA's Multi-Process Service, which lets kernels of several processes run at the same time. Its daemon is
started with folders of its own and stopped again; no setting of the device is changed.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from experiments.gpu_proof.plan import GPU
from experiments.gpu_proof.records import Job

CONTROL = "nvidia-cuda-mps-control"
CONTROL_SECONDS = 15.0
"""Longest that the daemon may take to start, and to end."""


def sharing(job: Job) -> None:
    """Each role alone, then both, first as the device shares itself, then under MPS if it can be started."""
    _pair(job, "time-sliced" if job.scale.device == GPU else "two cores", {})
    if job.scale.device != GPU:
        job.write("mps", absent="it needs a GPU")
        return
    try:
        with mps(job.results / "sharing") as environment:
            _pair(job, "mps", environment)
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        job.write("mps", absent=f"{type(error).__name__}: {error}")


@contextmanager
def mps(folder: Path) -> Iterator[Mapping[str, str]]:
    """Run the daemon; yields the environment that its clients need. Raises `RuntimeError` where it cannot run."""
    if shutil.which(CONTROL) is None:
        raise RuntimeError(f"{CONTROL} is not installed")
    folders = {"CUDA_MPS_PIPE_DIRECTORY": folder / "pipe", "CUDA_MPS_LOG_DIRECTORY": folder / "log"}
    for path in folders.values():
        path.mkdir(parents=True, exist_ok=True)
    environment = {name: str(path) for name, path in folders.items()}
    log = folder / "control.log"
    with log.open("wb") as file:  # in the foreground: it ends with this process's group, however that ends
        daemon = subprocess.Popen(
            [CONTROL, "-f"], env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    try:
        _await_control(daemon, folder / "pipe" / "control", log)
        yield environment
    finally:
        _quit(daemon, environment)


def _await_control(daemon: subprocess.Popen[bytes], pipe: Path, log: Path) -> None:
    deadline = time.monotonic() + CONTROL_SECONDS
    while not pipe.exists():
        if daemon.poll() is not None or time.monotonic() >= deadline:
            said = log.read_text(errors="replace").strip()
            raise RuntimeError(f"{CONTROL} -f does not listen at {pipe} (exit code {daemon.poll()}): {said}")
        time.sleep(0.05)


def _quit(daemon: subprocess.Popen[bytes], environment: Mapping[str, str]) -> None:
    if daemon.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [CONTROL],
                env={**os.environ, **environment},
                input=b"quit\n",
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=CONTROL_SECONDS,
                check=False,
            )
            daemon.wait(CONTROL_SECONDS)
    daemon.kill()
    daemon.wait()


def _pair(job: Job, how: str, environment: Mapping[str, str]) -> None:
    workers = {role: _Worker(role, job.scale.device, environment) for role in ("target", "draft")}
    try:
        for worker in workers.values():
            worker.answer()  # it is ready
        seconds = job.scale.share_seconds
        alone = {role: worker.run(seconds) for role, worker in workers.items()}
        for worker in workers.values():
            worker.begin(seconds)
        together = {role: worker.end() for role, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.close()
    speeds = {role: alone[role] / together[role] for role in workers}
    job.write(
        "sharing",
        how=how,
        target_alone_ms=alone["target"],
        draft_alone_ms=alone["draft"],
        target_together_ms=together["target"],
        draft_together_ms=together["draft"],
        sum_of_speeds=sum(speeds.values()),
    )


class _Worker:
    """One role in a process of its own, which works when it is told to."""

    def __init__(self, role: str, device: str, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "experiments.gpu_proof.sharing", role, device],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, seconds: float) -> float:
        """Milliseconds of a pass or step, median, of so many seconds of work."""
        self.begin(seconds)
        return self.end()

    def begin(self, seconds: float) -> None:
        """Start to work; does not wait."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()

    def end(self) -> float:
        """The median of the middle half of its time: the others may not have begun, or have ended."""
        times: list[float] = self.answer()
        quarter = len(times) // 4
        return statistics.median(times[quarter : len(times) - quarter] or times)

    def answer(self) -> Any:
        """The next line that it writes. Raises `RuntimeError` where it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


def main(role: str, device: str) -> None:
    """A worker's whole life: load, then work for as many seconds as each line says, and write each time."""
    from experiments.gpu_proof import adapter
    from experiments.gpu_proof.environment import token_ids
    from experiments.gpu_proof.plan import SCALES

    scale = SCALES[device]
    context = scale.contexts[0]
    config = adapter.engine_config(device, scale.target, scale.draft)
    prepared = adapter.prepared_target(config) if role == "target" else adapter.prepared_draft(config)
    model, cache = prepared.model, prepared.cache
    model.prefill(token_ids(model.num_ids, context, 1), cache)

    def work() -> None:
        cache.truncate(context)
        if role == "target":
            model.forward([7], cache).choose()
        else:
            model.extend([7], cache, 4)

    work()
    _say("ready")
    for line in sys.stdin:
        until = time.perf_counter() + float(line)
        times = []
        while (started := time.perf_counter()) < until or not times:
            work()
            times.append(1000 * (time.perf_counter() - started) / (1 if role == "target" else 4))
        _say(times)


def _say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
