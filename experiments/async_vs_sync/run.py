"""Is running ahead worth a device? Plain, synchronous (best length) and every policy, at temperatures 0 and 0.7."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

import statistics
from collections.abc import Sequence
from typing import Any

from amusd.console import table
from experiments.common import Document, compare, row_kind, speedups, write_jobs
from experiments.plotting import SPEEDUP, caption, grouped_bars, legend_above, look, mark_plain, run, subplots
from experiments.request import Request, parser_of

TEMPERATURE = "sampling.temperature"


def main() -> None:
    """Run the script."""
    run(parser_of("async_vs_sync", __doc__, num_prompts=40, num_tokens=96), measure, draw)


def measure(request: Request, _arguments: object) -> None:
    """Run a sweep of `amusd compare`, and print the table of categories."""
    common = [f"{TEMPERATURE}=0,0.7", "sampling.seed=1", *request.workload()]
    jobs = compare(
        [
            "compare.policies=[chain,windowed,branching,auto]",
            "num_speculative_tokens=7",  # tokens of a window, as many as the draft makes during a pass
            f"compare.synchronous_lengths={'[2]' if request.quick else '[1,2,3,4,5]'}",
            *common,
        ],
        request.runs / "sweep",
    )
    categories = [row for job in jobs for row in categories_of(job)]
    print(category_text(categories), end="\n\n")
    write_jobs(request, jobs, categories=categories)


def categories_of(job: Document) -> list[Document]:
    """The speed-ups of each row on each category: their median, and one for each prompt."""
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


def draw(results: Document) -> Any:
    """Panels one above the other, a temperature each: speed-ups by category."""
    rows = results["categories"]
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    figure, found = subplots(rows=len(temperatures), width=9.0, height=3.4 * len(temperatures))
    axes = list(found) if len(temperatures) > 1 else [found]
    for panel, temperature in zip(axes, temperatures, strict=True):
        own = [row for row in rows if row["temperature"] == temperature]
        names = list(dict.fromkeys(row["category"] for row in own))
        series = []
        for kind in dict.fromkeys(row["kind"] for row in own):
            alike = [row for row in own if row["kind"] == kind]
            series.append((kind, [row["speedups"] for row in alike], look(alike[0])[0]))
        grouped_bars(panel, names, series)
        mark_plain(panel)
        panel.set_ylabel(SPEEDUP)
        panel.set_xlabel(f"category of the prompts, temperature {temperature:g}")
    legend_above(axes[0])
    figure.supxlabel(caption(results), fontsize=7)
    return figure


if __name__ == "__main__":
    main()
