"""A draft on another machine: the cost of a network delay of 0 to 30 ms.

Two network namespaces of this machine, each with its own core, stand in for the machines. A virtual cable connects
them, and a relay delays every byte. One runs `amusd draft`, the other `amusd compare`, as a user types them.
The same comparison with a draft beside the target comes first. Needs root, for the namespaces, and Linux.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

import argparse
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from amusd.commands.tables import report
from amusd.errors import ConfigError
from amusd.transport.curve import write_keys
from experiments.common import Document, per_prompt_of, run_amusd, start_amusd, write_jobs
from experiments.lines import lines_over
from experiments.plotting import caption, run, subplots
from experiments.request import Request, parser_of

KEY = "delay_ms"
DELAYS = (0, 1, 10, 30)
TARGET, DRAFT = "10.78.0.1", "10.78.0.2"
PORT = 29501
IP = "/sbin/ip"
START_SECONDS = 120.0


def main() -> None:
    """Run the script."""
    run(parser_of("link_delay", __doc__, num_prompts=6, num_tokens=64), measure, draw)


def measure(request: Request, _arguments: argparse.Namespace) -> None:
    """Compare with a draft beside the target, then with one at each distance."""
    overrides = ["compare.policies=[auto]", "compare.synchronous_lengths=[1,2,4,7]", *request.workload()]
    if request.quick:
        overrides[1] = "compare.synchronous_lengths=[2]"
    keys = request.runs / "keys"
    write_keys(keys)
    jobs = [_job(request, "beside", overrides, [])]
    with two_machines((TARGET, DRAFT)) as names:
        here, there = (["ip", "netns", "exec", name] for name in names)
        for delay in DELAYS[: 2 if request.quick else None]:
            with _draft(there, keys), _cable(here, delay) as host:
                to = [f"drafter.address=tcp://{host}:{PORT}", f"transport.keys={keys}"]
                jobs.append(_job(request, delay, [*overrides, *to], [*here, "taskset", "-c", "0"]))
    write_jobs(request, jobs)


def _job(request: Request, delay: Any, overrides: Sequence[str], under: Sequence[str]) -> Document:
    folder = request.runs / str(delay)
    result = run_amusd("compare", overrides, folder, under=under)
    print(report(result["rows"]), flush=True)
    return {
        "command": f"amusd compare {' '.join(overrides)}".replace(f"{request.runs}/", ""),
        "settings": {KEY: delay},
        "rows": result["rows"],
        "per_prompt": per_prompt_of(folder),
        "machine": result["environment"],
    }


@contextmanager
def two_machines(addresses: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """The names of two network namespaces with these addresses, which a cable connects. Raises `ConfigError`."""
    names = (f"amusd-{os.getpid()}-0", f"amusd-{os.getpid()}-1")
    with ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
        ip("link", "add", "name", "cable", "netns", names[0], "type", "veth", "peer", "cable", "netns", names[1])
        for name, address in zip(names, addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/30", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names


def ip(*arguments: str) -> None:
    """Run `ip` with these arguments. Raises `ConfigError` if it fails."""
    done = subprocess.run([IP, *arguments], capture_output=True, text=True, timeout=START_SECONDS, check=False)
    if done.returncode:
        raise ConfigError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextmanager
def _draft(there: Sequence[str], keys: Path) -> Iterator[None]:
    arguments = ["draft", f"listen=tcp://{DRAFT}:{PORT}", f"transport.keys={keys}"]
    with start_amusd(arguments, [*there, "taskset", "-c", "1"]) as process:
        try:
            yield
        finally:
            process.terminate()


@contextmanager
def _cable(here: Sequence[str], delay: float) -> Iterator[str]:
    """The host at which the target finds the draft; without a delay, the draft's own."""
    if not delay:
        yield DRAFT
        return
    relay = [sys.executable, str(Path(__file__).with_name("relay.py"))]
    ends = [f"{TARGET}:{PORT}", f"{DRAFT}:{PORT}", str(delay / 1000)]
    with subprocess.Popen([*here, *relay, *ends]) as process:
        try:
            yield TARGET
        finally:
            process.terminate()


def draw(results: Document) -> Any:
    """Draw speed-ups over the delay."""
    figure, axes = subplots()
    lines_over(axes, [job for job in results["jobs"] if job["settings"][KEY] != "beside"], KEY)
    axes.set_xlabel("delay of the network, one way (ms)")
    axes.legend()
    figure.supxlabel(caption(results), fontsize=7)
    return figure


if __name__ == "__main__":
    main()
