"""Is running ahead worth a device? Plain, synchronous (best length) and every policy; greedy and at temperature 0.7.

First a device for each worker, all ways interleaved prompt by prompt. Then what else two devices could do: plain and
synchronous decoding with both cores for each pass, the workers taking turns.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

import statistics
from collections.abc import Sequence
from typing import Any

from amusd.console import table
from experiments.common import Document, compare, row_kind, run, speedups, write_jobs
from experiments.request import parser_of, request_of

TEMPERATURE = "sampling.temperature"
NUM_CORES = 2


def main() -> None:
    """Two sweeps of `amusd compare`, and the tables that are made of them."""
    parser = parser_of("async_vs_sync", __doc__, num_prompts=40, num_tokens=96)
    request = request_of(parser.parse_args())
    common = [f"{TEMPERATURE}=0,0.7", "sampling.seed=1", *request.workload()]
    jobs = compare(
        [
            "compare.policies=[chain,windowed,branching,auto]",
            "num_speculative_tokens=7",  # of a window: what the draft makes in a pass, and a pass can take
            f"compare.synchronous_lengths={'[2]' if request.quick else '[1,2,3,4,5]'}",
            *common,
        ],
        request.runs / "a_core_each",
    )
    shared = compare(
        [
            "mode=synchronous",
            f"num_speculative_tokens={'2' if request.quick else '2,4'}",
            f"hardware.num_threads={NUM_CORES}",
            "hardware.pin_cores=false",
            *common,
        ],
        request.runs / "both_cores_in_turns",
    )
    categories = [row for job in jobs for row in categories_of(job)]
    devices = accounting(jobs, shared)
    print(category_text(categories), device_text(devices), sep="\n\n", end="\n\n")
    both = [{name: value for name, value in job.items() if name != "machine"} for job in shared]
    write_jobs(request, jobs, both_cores_in_turns=both, categories=categories, devices=devices)


def categories_of(job: Document) -> list[Document]:
    """The gains of each row on each category of prompts: medians, and those of each prompt."""
    prompts: dict[str, list[Document]] = {}
    for one in job["per_prompt"]:
        prompts.setdefault(one["category"] or "other", []).append(one)
    return [
        {
            "temperature": float(job["settings"][TEMPERATURE]),
            "category": category,
            "kind": row_kind(row),
            "mode": row["mode"],
            "policy": row["policy"],
            "speedup_vs_autoregressive": statistics.median(speedups(own, row["contestant"])),
            "speedups": speedups(own, row["contestant"]),
        }
        for category, own in prompts.items()
        for row in job["rows"][1:]
    ]


def accounting(jobs: Sequence[Document], shared: Sequence[Document]) -> list[Document]:
    """Tokens per second by the cores that are occupied, whether they work or not.

    `jobs`: a core for each worker. `shared`: both cores for each pass; the fastest of its jobs counts, and plain
    decoding, which is in all of them, at its fastest too.
    """
    found = []
    for job in jobs:
        temperature = job["settings"][TEMPERATURE]
        rows = [(row, row["num_devices"], row_kind(row)) for row in job["rows"]]
        alike = [row for other in shared if other["settings"][TEMPERATURE] == temperature for row in other["rows"]]
        for kind in dict.fromkeys(row_kind(row) for row in alike):
            own = [row for row in alike if row_kind(row) == kind]
            fastest = max(own, key=lambda row: float(row["tokens_per_second"]))
            rows.append((fastest, NUM_CORES, f"{kind}, both cores for each pass"))
        plain = job["rows"][0]["tokens_per_second"]
        found += [
            {
                "temperature": float(temperature),
                "kind": kind,
                "num_speculative_tokens": row["num_speculative_tokens"],
                "num_cores": cores,
                "tokens_per_second": row["tokens_per_second"],
                "tokens_per_second_per_core": row["tokens_per_second"] / cores,
                "of_plain_on_one_core": row["tokens_per_second"] / plain,
            }
            for row, cores, kind in rows
        ]
    return found


def category_text(categories: Sequence[Document]) -> str:
    """Medians: a line for each temperature and category, a column for each way to decode."""
    kinds = list(dict.fromkeys(row["kind"] for row in categories))
    cells: dict[tuple[float, str], dict[str, Any]] = {}
    for row in categories:
        cells.setdefault((row["temperature"], row["category"]), {})[row["kind"]] = (
            f"{row['speedup_vs_autoregressive']:.2f}"
        )
    lines = [(f"{key[0]:g}", key[1], *(own[kind] for kind in kinds)) for key, own in cells.items()]
    return table(("temperature", "category", *kinds), lines)


def device_text(devices: Sequence[Document]) -> str:
    """One line for each way to use the cores."""
    lines = [
        (
            row["kind"],
            f"{row['temperature']:g}",
            str(row["num_cores"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['tokens_per_second_per_core']:.1f}",
            f"{row['of_plain_on_one_core']:.2f}",
        )
        for row in devices
    ]
    return table(("mode", "temperature", "cores", "tokens/s", "tokens/s/core", "x plain, 1 core"), lines)


if __name__ == "__main__":
    run(main)
