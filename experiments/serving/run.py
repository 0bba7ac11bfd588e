"""How long users wait: plain, synchronous and asynchronous decoding in turns on one `amusd serve`, under the same load.

The server is started here, with as many rows as there are users at most. Every block of requests is sent once for each
mode before the next one.
Overrides of `amusd serve` come last: python experiments/serving/run.py --users 1 4 -- drafter=ngram policy=chain
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from amusd.errors import ConfigError
from experiments.common import Document, run, write_results
from experiments.request import ROOT, parser_of, request_of
from experiments.serving.client import Body, Endpoint, Load, Sample, first_model, measure
from experiments.serving.load import (
    REQUESTS_PER_USER,
    USERS,
    Limits,
    add_loads,
    add_sampling,
    bodies_of,
    endless,
    loads_of,
    row_of,
    rows_text,
    warm_up,
)

MODES: dict[str, dict[str, Any]] = {
    "autoregressive": {"mode": "autoregressive"},
    "synchronous": {"mode": "synchronous", "num_speculative_tokens": 2},
    "asynchronous": {"mode": "asynchronous"},
}
"""Fields of `amusd serve` that choose how a request is decoded."""
Blocks = dict[tuple[Load, str], tuple[list[Sample], float]]
"""For each load and mode, the samples of all rounds, and the seconds that these took together."""
START_SECONDS, END_SECONDS, LOOK_SECONDS = 300.0, 60.0, 0.2
"""How long the server may take to be ready and to end, and how often that is looked at."""


def main() -> None:
    """Start the server, send every block in every mode, end it, write what came out."""
    parser = parser_of("serving", __doc__, num_prompts=16, num_tokens=64)
    add_loads(parser)
    add_sampling(parser)
    parser.add_argument("--rounds", type=int, default=1, help="blocks of each load (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for `amusd serve`")
    arguments = parser.parse_args()
    request = request_of(arguments)
    if arguments.users is None and not arguments.rates:
        arguments.users = [1, 2] if request.quick else USERS
    loads = loads_of(arguments)
    limits = Limits(ttft=arguments.ttft_limit, tpot=arguments.tpot_limit)
    request.runs.mkdir(parents=True, exist_ok=True)
    blocks: Blocks = {}
    with serving([f"max_num_seqs={most_users(loads)}", *arguments.overrides], request.runs) as endpoint:
        bodies = bodies_of(request, endpoint, arguments)
        for mode, fields in MODES.items():
            asyncio.run(warm_up(endpoint, {**bodies[0], **fields}))
            print(f"{mode}: warm", file=sys.stderr, flush=True)
        for number, load in itertools.product(range(arguments.rounds), loads):
            send_block(blocks, endpoint, load, number, bodies)
    rows = rows_of(blocks, loads, limits)
    print(rows_text(rows))
    print(identical_text(rows))
    from launch.environment import describe_environment

    measured = {"rows": rows, "limits": asdict(limits), "rounds": arguments.rounds, "overrides": arguments.overrides}
    write_results(request, describe_environment(), measured)


def most_users(loads: Sequence[Load]) -> int:
    """Rows that the server needs; Poisson arrivals may wait in its queue."""
    return max(load.users or 8 for load in loads)


def send_block(blocks: Blocks, endpoint: Endpoint, load: Load, number: int, bodies: Sequence[Body]) -> None:
    """The same requests in every mode; which mode begins changes from round to round."""
    size = REQUESTS_PER_USER * (load.users or 8)
    chosen = list(itertools.islice(endless(bodies), number * size, (number + 1) * size))
    modes = list(MODES)
    for mode in modes[number % len(modes) :] + modes[: number % len(modes)]:
        asked = [{**body, **MODES[mode]} for body in chosen]
        samples, seconds = asyncio.run(measure(endpoint, load, asked))
        before, seconds_before = blocks.get((load, mode), ([], 0.0))
        blocks[load, mode] = ([*before, *samples], seconds_before + seconds)
        failed = sum(sample.error is not None for sample in samples)
        num_tokens = sum(sample.num_tokens for sample in samples)
        print(f"{load}, {mode}: {num_tokens / seconds:.1f} tokens/s, {failed} failed", file=sys.stderr, flush=True)


def rows_of(blocks: Blocks, loads: Sequence[Load], limits: Limits) -> list[Document]:
    """A row for each load and mode, with its speed-up and how many of its answers are those of plain decoding."""
    rows = []
    for load in loads:
        plain, plain_seconds = blocks[load, "autoregressive"]
        plain_speed = row_of("autoregressive", load, plain, plain_seconds, limits)["tokens_per_second"]
        for mode in MODES:
            samples, seconds = blocks[load, mode]
            row = row_of(mode, load, samples, seconds, limits)
            alike = [one.digest == other.digest for one, other in zip(samples, plain, strict=True)]
            more = {"speedup": row["tokens_per_second"] / plain_speed if plain_speed else None, "identical": sum(alike)}
            rows.append({**row, **more})
    return rows


def identical_text(rows: Sequence[Document]) -> str:
    """One line: all answers beside those of plain decoding."""
    others = [row for row in rows if row["name"] != "autoregressive"]
    same, number = (sum(row[name] for row in others) for name in ("identical", "num_requests"))
    return f"{same} of {number} answers are those of plain decoding under the same load"


# The server


@contextmanager
def serving(overrides: Sequence[str], folder: Path) -> Iterator[Endpoint]:
    """Start `amusd serve` of this checkout on a free port, and end it with SIGTERM; its log is `serve.log` in `folder`.

    Raises `ConfigError` when it does not become ready, or does not end with exit code 0.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "launch.main", "serve", f"serve.port={port}", *overrides]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    url = f"http://127.0.0.1:{port}"
    log = folder / "serve.log"
    with log.open("ab") as file:
        process = subprocess.Popen(
            [*command, f"run_dir={folder / f'serve-{os.getpid()}'}"],
            env={**os.environ, "PYTHONPATH": path},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        _await_ready(process, url, log)
        yield Endpoint(url=url, model=asyncio.run(first_model(url, None)))
        process.send_signal(signal.SIGTERM)
        if process.wait(END_SECONDS):
            raise ConfigError(f"amusd serve: exit code {process.returncode}; what it said: {log}")
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"amusd serve did not end within {END_SECONDS:.0f} s of SIGTERM; {log}") from error
    finally:
        _end(process)


def _await_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Return when `/health` answers 200. Raises `ConfigError` if the server ends first, or takes too long."""
    import httpx

    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ConfigError(f"amusd serve: exit code {process.returncode}; what it said: {log}")
        try:
            if httpx.get(f"{url}/health", timeout=5.0).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(LOOK_SECONDS)
    raise ConfigError(f"amusd serve was not ready within {START_SECONDS:.0f} s; {log}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server if it has not ended, also after an interruption."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    run(main)
