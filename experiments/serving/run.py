"""Latency under load: plain, synchronous and asynchronous decoding in turns on one `amusd serve`.

Every block of requests is sent once in each mode before the next block. With `--url` the load goes to a running server.
Overrides of `amusd serve` come last: python experiments/serving/run.py --users 1 4 -- drafter=ngram policy=chain
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

import argparse
import asyncio
import itertools
import os
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from amusd.console import table
from amusd.errors import ConfigError
from experiments.common import Document, end, start_amusd, write_results
from experiments.plotting import LOOKS, caption, run, subplots
from experiments.request import Request, parser_of
from experiments.serving.client import Body, Endpoint, Sample, first_model, measure

USERS = (1, 2, 4, 8, 16)
REQUESTS_PER_USER = 2
WARM_UP_TOKENS = 4
PERCENTILES = (50, 90, 99)
TTFT_LIMIT, TPOT_LIMIT = 2.0, 0.1
"""Most seconds to the first token, and for each further one, of answers that count as goodput."""
MODES: dict[str, dict[str, Any]] = {
    "autoregressive": {"mode": "autoregressive"},
    "synchronous": {"mode": "synchronous"},
    "asynchronous": {"mode": "asynchronous"},
}
"""Fields of `amusd serve` that choose how a request is decoded."""
Blocks = dict[tuple[int, str], tuple[list[Sample], float]]
"""By number of users and mode: the samples of all rounds, and their seconds together."""
START_SECONDS, END_SECONDS, LOOK_SECONDS = 300.0, 60.0, 0.2
"""Longest time for the server to be ready, and to end; time between two checks."""


def main() -> None:
    """Run the script."""
    parser = parser_of("serving", __doc__, num_prompts=16, num_tokens=64)
    parser.add_argument("--users", type=int, nargs="+", metavar="N", help=f"default: {USERS}")
    parser.add_argument("--rounds", type=int, default=1, help="blocks of each load (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s")
    parser.add_argument("--url", help="URL of a running server, without /v1; its key: $OPENAI_API_KEY")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for `amusd serve`")
    run(parser, measure_all, draw)


def measure_all(request: Request, arguments: argparse.Namespace) -> None:
    """Start the server, send every block in every mode, end it, write the results."""
    all_users = arguments.users or ([1, 2] if request.quick else USERS)
    request.runs.mkdir(parents=True, exist_ok=True)
    overrides = [f"max_num_seqs={max(all_users)}", "num_speculative_tokens=2", *arguments.overrides]
    blocks: Blocks = {}
    with serving(overrides, request.runs) if arguments.url is None else nullcontext(arguments.url) as url:
        key = None if arguments.url is None else os.environ.get("OPENAI_API_KEY")
        endpoint = Endpoint(url=url, model=asyncio.run(first_model(url, key)), api_key=key)
        modes = MODES if arguments.url is None else {endpoint.model: {}}
        bodies = bodies_of(request, endpoint, arguments.temperature)
        for mode, fields in modes.items():
            warm_up(endpoint, {**bodies[0], **fields})
            print(f"{mode}: warm", file=sys.stderr, flush=True)
        for number, users in itertools.product(range(arguments.rounds), all_users):
            send_block(blocks, endpoint, users, number, bodies, modes)
    rows = rows_of(blocks)
    print(rows_text(rows))
    if arguments.url is None:
        print(identical_text(rows))
    from launch.environment import describe_environment

    measured = {"rows": rows, "limits": {"ttft": TTFT_LIMIT, "tpot": TPOT_LIMIT}, "rounds": arguments.rounds}
    write_results(request, describe_environment(), {**measured, "overrides": arguments.overrides})


def bodies_of(request: Request, endpoint: Endpoint, temperature: float) -> list[Body]:
    """A request for each prompt. Raises `ConfigError`."""
    return [
        {
            "model": endpoint.model,
            "messages": list(prompt.turns),
            "max_tokens": request.num_tokens,
            "temperature": temperature,
            "seed": number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for number, prompt in enumerate(request.load())
    ]


def warm_up(endpoint: Endpoint, body: Body) -> None:
    """Ask for one short answer that no row counts. Raises `ConfigError` if the endpoint gives none."""
    samples, _ = asyncio.run(measure(endpoint, 1, [{**body, "max_tokens": WARM_UP_TOKENS}]))
    if samples[0].error:
        raise ConfigError(f"{endpoint.url}: {samples[0].error}")


def send_block(
    blocks: Blocks, endpoint: Endpoint, users: int, number: int, bodies: Sequence[Body], modes: Mapping[str, Body]
) -> None:
    """Send the same requests in every mode; the mode that begins changes from round to round."""
    size = REQUESTS_PER_USER * users
    chosen = list(itertools.islice(itertools.cycle(bodies), number * size, (number + 1) * size))
    names = list(modes)
    for mode in names[number % len(names) :] + names[: number % len(names)]:
        samples, seconds = asyncio.run(measure(endpoint, users, [{**body, **modes[mode]} for body in chosen]))
        before, seconds_before = blocks.get((users, mode), ([], 0.0))
        blocks[users, mode] = ([*before, *samples], seconds_before + seconds)
        failed = sum(sample.error is not None for sample in samples)
        num_tokens = sum(sample.num_tokens for sample in samples)
        print(f"{users} users, {mode}: {num_tokens / seconds:.1f} tokens/s, {failed} failed", file=sys.stderr)


def rows_of(blocks: Blocks) -> list[Document]:
    """A row for each load and mode, with its speed-up and the number of answers equal to those of the first mode."""
    rows: list[Document] = []
    plain: dict[int, tuple[Document, list[Sample]]] = {}
    for (users, mode), (samples, seconds) in blocks.items():
        row = row_of(mode, users, samples, seconds)
        first, others = plain.setdefault(users, (row, samples))
        speed = first["tokens_per_second"]
        alike = [one.digest == other.digest for one, other in zip(samples, others, strict=True)]
        more = {"speedup": row["tokens_per_second"] / speed if speed else None, "identical": sum(alike)}
        rows.append({**row, **more})
    return rows


def row_of(name: str, users: int, samples: Sequence[Sample], seconds: float) -> Document:
    """The figures of one load. Latencies are those of complete answers; throughput counts their tokens alone."""
    complete = [sample for sample in samples if sample.error is None]
    num_tokens = sum(sample.num_tokens for sample in complete)
    num_chunks = sum(len(sample.chunks) for sample in complete)
    in_time = [one for one in complete if (one.ttft or 0) <= TTFT_LIMIT and (one.tpot or 0) <= TPOT_LIMIT]
    return {
        "name": name,
        "users": users,
        "num_requests": len(samples),
        "num_complete": len(complete),
        "errors": dict(Counter(sample.error for sample in samples if sample.error is not None)),
        "seconds": seconds,
        "num_tokens": num_tokens,
        "tokens_are_chunks": not all(sample.has_usage for sample in complete),
        "tokens_per_chunk": num_tokens / num_chunks if num_chunks else None,
        "tokens_per_second": num_tokens / seconds,
        "requests_per_second": len(complete) / seconds,
        "goodput": len(in_time) / seconds,
        "ttft_ms": spread([sample.ttft for sample in complete]),
        "tpot_ms": spread([sample.tpot for sample in complete]),
        "itl_ms": spread([gap for sample in complete for gap in sample.gaps]),
        "latency_ms": spread([sample.latency for sample in complete]),
    }


def spread(seconds: Sequence[float | None]) -> Mapping[str, float] | None:
    """Mean and percentiles in milliseconds of the known values; None without any."""
    found = [1000 * value for value in seconds if value is not None]
    if not found:
        return None
    shares = {f"p{percent}": float(np.percentile(found, percent)) for percent in PERCENTILES}
    return {"mean": sum(found) / len(found), **shares}


def rows_text(rows: Sequence[Document]) -> str:
    """A table with a line for each row; times in milliseconds."""
    times = (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("tpot_ms", "p50"), ("tpot_ms", "p99"), ("itl_ms", "p99"))
    lines = [
        (
            row["name"],
            str(row["users"]),
            f"{row['num_complete']}/{row['num_requests']}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['goodput']:.2f}",
            *(f"{row[name][percent]:.0f}" if row[name] else "-" for name, percent in times),
        )
        for row in rows
    ]
    columns = ("name", "users", "complete", "tokens/s", "goodput", "TTFT p50", "p99", "TPOT p50", "p99", "ITL p99")
    return table(columns, lines)


def identical_text(rows: Sequence[Document]) -> str:
    """One line that compares all answers with those of plain decoding."""
    others = [row for row in rows if row["name"] != "autoregressive"]
    same, number = (sum(row[name] for row in others) for name in ("identical", "num_requests"))
    return f"{same} of {number} answers are those of plain decoding under the same load"


# The server


@contextmanager
def serving(overrides: Sequence[str], folder: Path) -> Iterator[str]:
    """Start `amusd serve`, yield its address, and end it with SIGTERM.

    Raises `ConfigError` if it does not start or end well.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["serve", f"serve.port={port}", *overrides, f"run_dir={folder / f'serve-{os.getpid()}'}"]
    url, log = f"http://127.0.0.1:{port}", folder / "serve.log"
    with log.open("ab") as file:
        process = start_amusd(arguments, stdout=file, stderr=subprocess.STDOUT)
    try:
        _await_ready(process, url, log)
        yield url
        process.send_signal(signal.SIGTERM)
        if process.wait(END_SECONDS):
            raise ConfigError(f"amusd serve: exit code {process.returncode}; what it said: {log}")
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"amusd serve did not end within {END_SECONDS:.0f} s of SIGTERM; {log}") from error
    finally:
        end(process)


def _await_ready(process: subprocess.Popen[Any], url: str, log: Path) -> None:
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


MODE_LOOKS = {"asynchronous": LOOKS["branching"], **LOOKS}
"""Colours of the modes; rows with other names take those left."""


def draw(results: Document) -> Any:
    """Four panels above one another. Bands of latencies reach from the median to the 99th percentile."""
    rows = [row for row in results["rows"] if row["num_complete"]]
    limits = results["limits"]
    panels: list[tuple[str, Callable[[Document], tuple[float, float]]]] = [
        ("tokens a second, all users", lambda row: (row["tokens_per_second"],) * 2),
        ("time to first token (s)", lambda row: _band(row, "ttft_ms", 1000)),
        ("time per token (ms)", lambda row: _band(row, "tpot_ms", 1)),
        (
            f"answers a second within {limits['ttft']:g} s\nand {1000 * limits['tpot']:g} ms a token (goodput)",
            lambda row: (row["goodput"],) * 2,
        ),
    ]
    figure, all_axes = subplots(rows=len(panels), height=2.5 * len(panels))
    for axes, (title, value) in zip(all_axes, panels, strict=True):
        for number, name in enumerate(dict.fromkeys(row["name"] for row in rows)):
            colour, marker = MODE_LOOKS.get(name) or list(LOOKS.values())[number % len(LOOKS)]
            own = sorted((row for row in rows if row["name"] == name), key=lambda row: float(row["users"]))
            places = [row["users"] for row in own]
            found = [value(row) for row in own]
            axes.plot(places, [low for low, _ in found], color=colour, marker=marker, label=name)
            axes.fill_between(places, *zip(*found, strict=True), color=colour, alpha=0.12)
        axes.set_ylabel(title)
        axes.margins(y=0.1)
        axes.set_ylim(bottom=0)
        ticks = sorted({row["users"] for row in rows})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    all_axes[-1].set_xlabel("concurrent users")
    all_axes[0].legend()
    figure.supxlabel(caption(results), fontsize=7)
    return figure


def _band(row: Document, name: str, divisor: float) -> tuple[float, float]:
    found = row[name] or {"p50": float("nan"), "p99": float("nan")}
    return found["p50"] / divisor, found["p99"] / divisor


if __name__ == "__main__":
    main()
