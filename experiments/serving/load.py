"""Load any OpenAI endpoint, and say how long its users wait: amusd, vLLM, SGLang, under the same requests.

Users who ask again when answered (--users), or arrivals by a Poisson process (--rates), or both after each other.
Start the server first. Example: python experiments/serving/load.py --url http://127.0.0.1:8000 --users 1 4 16
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

import argparse
import asyncio
import datetime as dt
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from amusd.config import WorkloadConfig
from amusd.console import table
from amusd.errors import ConfigError
from amusd.workload import load_prompts
from experiments.common import Document, read_results, run, write_results
from experiments.request import ROOT, Request
from experiments.serving.client import Body, Endpoint, Load, Sample, first_model, measure

USERS = (1, 2, 4, 8, 16)
PERCENTILES = (50, 90, 99)
REQUESTS_PER_USER = 2
WARM_UP_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a good answer keeps, in seconds; goodput counts the answers that keep both."""

    ttft: float = 2.0
    tpot: float = 0.1

    def are_kept(self, sample: Sample) -> bool:
        """Whether the request was answered in time."""
        ttft, tpot = sample.ttft, sample.tpot
        in_time = (ttft is None or ttft <= self.ttft) and (tpot is None or tpot <= self.tpot)
        return sample.error is None and in_time


def main() -> None:
    """One row for each load: a table, and a file of results."""
    arguments = parser().parse_args()
    rows = [row for file in arguments.beside for row in read_results(file)["rows"]]
    request, loads = request_of(arguments), loads_of(arguments)
    endpoint = endpoint_of(arguments)
    bodies = bodies_of(request, endpoint, arguments)
    asyncio.run(warm_up(endpoint, bodies[0]))
    limits = Limits(ttft=arguments.ttft_limit, tpot=arguments.tpot_limit)
    name = arguments.name or endpoint.model
    runs = []
    for load in loads:
        number = arguments.num_requests or REQUESTS_PER_USER * (load.users or 8)
        samples, seconds = asyncio.run(measure(endpoint, load, list(itertools.islice(endless(bodies), number))))
        rows.append(row_of(name, load, samples, seconds, limits))
        runs.append({"name": name, "load": asdict(load), "samples": [asdict(sample) for sample in samples]})
        print(f"{name}, {load}: {rows[-1]['tokens_per_second']:.1f} tokens/s", file=sys.stderr, flush=True)
    print(rows_text(rows))
    from launch.environment import describe_environment

    measured = {"rows": rows, "limits": asdict(limits), "runs": runs}
    write_results(request, describe_environment(), measured)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python experiments/serving/load.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("--url", default="http://127.0.0.1:8000", help="base of the endpoint, without /v1 (default: %(default)s)")
    add("--model", help="default: the first that the endpoint lists")
    add("--name", help="of the rows in table and figure (default: the model)")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY")
    add("--completions", action="store_true", help="ask /v1/completions instead of /v1/chat/completions")
    add_loads(found)
    add("--num-requests", type=int, help=f"of each load (default: {REQUESTS_PER_USER} a user)")
    add("--prompts", type=Path, metavar="FILE", help="JSON lines (default: the package's own)")
    add("--num-prompts", type=int, default=16, help="spread over the file, repeated as needed (default: %(default)s)")
    add("--max-tokens", type=int, default=64, help="of each answer at most (default: %(default)s)")
    add_sampling(found)
    add("--extra", type=json.loads, default={}, metavar="JSON", help="""more fields: '{"mode": "synchronous"}'""")
    add("--beside", type=Path, nargs="+", default=[], metavar="FILE", help="earlier results, for table and figure")
    add("--out", type=Path, metavar="FILE", help="of the results (default: load.json in a new folder of runs/)")
    return found


def add_loads(found: argparse.ArgumentParser) -> None:
    """The options for loads, their schedule, and the limits of goodput."""
    add = found.add_argument
    add("--users", type=int, nargs="*", metavar="N", help=f"each asks again when answered (default: {USERS})")
    add("--rates", type=float, nargs="*", default=[], metavar="R", help="requests a second, by a Poisson process")
    add("--ttft-limit", type=float, default=Limits.ttft, metavar="S", help="of goodput (default: %(default)s s)")
    add("--tpot-limit", type=float, default=Limits.tpot, metavar="S", help="of goodput (default: %(default)s s)")


def add_sampling(found: argparse.ArgumentParser) -> None:
    """The options for what each request asks."""
    found.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s")
    found.add_argument("--seed", type=int, default=0, help="of arrivals, and of the first request; then upwards")


def loads_of(arguments: argparse.Namespace) -> list[Load]:
    """The loads that were asked for, users first. Raises `ConfigError`."""
    users = arguments.users
    if users is None:
        users = [] if arguments.rates else USERS
    loads = [Load(users=number) for number in users]
    loads += [Load(rate=rate, seed=arguments.seed) for rate in arguments.rates]
    if not loads or any((load.users or load.rate or 0) <= 0 for load in loads):
        raise ConfigError("--users and --rates: must be positive, and at least one is needed")
    return loads


def request_of(arguments: argparse.Namespace) -> Request:
    """What was typed, in the words that all experiments share. Raises `ConfigError`."""
    for option in ("num_prompts", "max_tokens", "num_requests"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise ConfigError(f"--{option.replace('_', '-')}={value}: must be at least 1")
    runs = ROOT / "runs" / f"serving-{dt.datetime.now().astimezone():%Y-%m-%d-%H%M%S}-{os.getpid()}"
    return Request(
        experiment="serving",
        prompts=arguments.prompts,
        num_prompts=arguments.num_prompts,
        num_tokens=arguments.max_tokens,
        quick=False,
        out=arguments.out or runs / "load.json",
        runs=runs,
    )


def endpoint_of(arguments: argparse.Namespace) -> Endpoint:
    """Where to ask; asks for the model's name if none was typed. Raises `ConfigError`."""
    try:
        import httpx  # noqa: F401
    except ImportError:
        raise ConfigError("a load needs httpx: pip install httpx") from None
    url = arguments.url.rstrip("/").removesuffix("/v1")
    model = arguments.model or asyncio.run(first_model(url, arguments.api_key))
    return Endpoint(
        url=url,
        model=model,
        api_key=arguments.api_key,
        is_chat=not arguments.completions,
    )


def bodies_of(request: Request, endpoint: Endpoint, arguments: argparse.Namespace) -> list[Body]:
    """A request for each prompt. Raises `ConfigError`."""
    request.workload()  # writes the chosen prompts beside the runs
    workload = WorkloadConfig(path=str(request.runs / "prompts.jsonl"), num_prompts=len(request.lines()))
    common = {
        "model": endpoint.model,
        "max_tokens": request.num_tokens,
        "temperature": arguments.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        **getattr(arguments, "extra", {}),
    }
    return [
        {
            **({"messages": list(prompt.turns)} if endpoint.is_chat else {"prompt": prompt.text}),
            "seed": arguments.seed + number,
            **common,
        }
        for number, prompt in enumerate(load_prompts(workload))
    ]


def endless(bodies: Sequence[Body]) -> Any:
    """The bodies again and again, each time with other seeds."""
    for time_round in itertools.count():
        for body in bodies:
            yield {**body, "seed": body["seed"] + time_round * len(bodies)}


async def warm_up(endpoint: Endpoint, body: Body) -> None:
    """One short answer that no row counts. Raises `ConfigError` if the endpoint gives none."""
    samples, _ = await measure(endpoint, Load(users=1), [{**body, "max_tokens": WARM_UP_TOKENS}])
    if samples[0].error:
        raise ConfigError(f"{endpoint.url}: {samples[0].error}")


# What is read off the samples


def row_of(name: str, load: Load, samples: Sequence[Sample], seconds: float, limits: Limits) -> Document:
    """The figures of one load. Latencies are those of complete answers; throughput counts their tokens alone."""
    complete = [sample for sample in samples if sample.error is None]
    errors: dict[str, int] = {}
    for sample in samples:
        if sample.error is not None:
            errors[sample.error] = errors.get(sample.error, 0) + 1
    num_tokens = sum(sample.num_tokens for sample in complete)
    num_chunks = sum(len(sample.chunks) for sample in complete)
    return {
        "name": name,
        "users": load.users,
        "rate": load.rate,
        "num_requests": len(samples),
        "num_complete": len(complete),
        "errors": errors,
        "seconds": seconds,
        "num_tokens": num_tokens,
        "tokens_are_chunks": any(sample.usage is None for sample in complete),
        "tokens_per_chunk": num_tokens / num_chunks if num_chunks else None,
        "tokens_per_second": num_tokens / seconds if seconds else 0.0,
        "requests_per_second": len(complete) / seconds if seconds else 0.0,
        "goodput": sum(limits.are_kept(sample) for sample in samples) / seconds if seconds else 0.0,
        "ttft_ms": spread([sample.ttft for sample in complete]),
        "tpot_ms": spread([sample.tpot for sample in complete]),
        "itl_ms": spread([gap for sample in complete for gap in sample.gaps]),
        "latency_ms": spread([sample.latency for sample in complete]),
        "lateness_ms": spread([sample.sent - sample.due for sample in samples]),
    }


def spread(seconds: Sequence[float | None]) -> Mapping[str, float] | None:
    """Mean and percentiles in milliseconds of what is there; None where nothing is."""
    found = [1000 * value for value in seconds if value is not None]
    if not found:
        return None
    shares = {f"p{percent}": float(np.percentile(found, percent)) for percent in PERCENTILES}
    return {"mean": sum(found) / len(found), **shares}


COLUMNS = ("name", "load", "complete", "tokens/s", "requests/s", "goodput", "TTFT p50", "p99", "TPOT p50", "p99")
MORE_COLUMNS = ("ITL p99", "latency p50", "p99")


def rows_text(rows: Sequence[Document]) -> str:
    """A table with a line for each row; times in milliseconds."""

    def ms(row: Document, name: str, percent: str) -> str:
        return f"{row[name][percent]:.0f}" if row[name] else "-"

    lines = [
        (
            row["name"],
            str(Load(users=row["users"], rate=row["rate"])),
            f"{row['num_complete']}/{row['num_requests']}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['requests_per_second']:.2f}",
            f"{row['goodput']:.2f}",
            *(ms(row, name, percent) for name in ("ttft_ms", "tpot_ms") for percent in ("p50", "p99")),
            ms(row, "itl_ms", "p99"),
            *(ms(row, "latency_ms", percent) for percent in ("p50", "p99")),
        )
        for row in rows
    ]
    return table((*COLUMNS, *MORE_COLUMNS), lines)


if __name__ == "__main__":
    run(main)
