"""How near `policy=auto` comes to the best fixed setting, over drafts, speeds and distances. In the simulator.

Every cell knows the best of plain decoding, synchronous blocks and windows of each length, chain and branching with
each wait, found by trying all of them on the same answers; `auto` has to find its own while it answers. --num-prompts
and --tokens say how many answers are simulated, and of how many tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

import statistics
from collections.abc import Sequence

from amusd.console import table
from amusd.errors import ConfigError
from experiments.common import Document, run, run_amusd, write_results
from experiments.request import Request, parser_of, request_of

VERIFY_MS = 40.0
DELAYS = (0.0, 0.1, 0.2)
"""Of a message one way, in passes."""
ACCEPTS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
RATIOS = (3, 5, 10, 20)
"""Draft steps in the time of a pass."""


def main() -> None:
    """A map for each delay, as `amusd simulate` makes it."""
    parser = parser_of("controller", __doc__, num_prompts=6, num_tokens=160)
    request = request_of(parser.parse_args())
    if request.prompts is not None:
        raise ConfigError("--prompts: nothing is generated here, answers are drawn")
    from launch.environment import describe_environment

    rows = [row for delay in (DELAYS[:1] if request.quick else DELAYS) for row in simulated(request, delay)]
    summary = summary_of(rows)
    print(rows_text(rows), summary_text(summary), sep="\n\n")
    write_results(request, describe_environment(), {"rows": rows, "summary": summary})


def simulated(request: Request, delay: float) -> list[Document]:
    """A row for each acceptance and ratio."""
    accepts, ratios = (ACCEPTS[::3], RATIOS[::2]) if request.quick else (ACCEPTS, RATIOS)
    overrides = [
        "accept=0.5",
        f"verify_ms={VERIFY_MS:g}",
        "draft_ms=4",
        f"delay_ms={delay * VERIFY_MS:g}",
        "simulate.jitter=0.05",
        f"simulate.num_answers={request.num_prompts}",
        f"simulate.num_tokens={request.num_tokens}",
        "simulate.synchronous_lengths=[1,2,4,7]",
        "simulate.min_candidates=[0,1,2,4]",
        "simulate.grid=true",
        f"simulate.grid_accepts=[{','.join(map(str, accepts))}]",
        f"simulate.grid_ratios=[{','.join(map(str, ratios))}]",
    ]
    cells = run_amusd("simulate", overrides, request.runs / f"delay_{delay:g}")["grid"]
    return [
        {
            "accept": cell["accept"],
            "ratio": cell["ratio"],
            "delay": delay,
            "best": cell["winner"],
            "best_speedup": cell["speedups"][cell["winner"]],
            "auto_speedup": cell["auto"],
            "auto_of_best": cell["auto"] / cell["speedups"][cell["winner"]],
        }
        for cell in cells
    ]


def summary_of(rows: Sequence[Document]) -> Document:
    """What share of the best `auto` reaches, and the least that it gains over plain decoding."""
    shares = [row["auto_of_best"] for row in rows]
    return {
        "num_cells": len(rows),
        "median": statistics.median(shares),
        "worst": min(shares),
        "num_below_95_percent": sum(share < 0.95 for share in shares),
        "least_speedup": min(row["auto_speedup"] for row in rows),
    }


def rows_text(rows: Sequence[Document]) -> str:
    """A line for each delay and acceptance: `auto`, and its share of the best in percent."""
    ratios = list(dict.fromkeys(row["ratio"] for row in rows))
    cells: dict[tuple[float, float], dict[float, str]] = {}
    for row in rows:
        shown = f"{row['auto_speedup']:.2f} ({100 * row['auto_of_best']:.0f} % of {row['best']})"
        cells.setdefault((row["delay"], row["accept"]), {})[row["ratio"]] = shown
    lines = [(f"{key[0]:g}", f"{key[1]:g}", *(own[ratio] for ratio in ratios)) for key, own in cells.items()]
    return table(("delay, passes", "accept \\ steps a pass", *(f"{ratio:g}" for ratio in ratios)), lines)


def summary_text(summary: Document) -> str:
    """One line."""
    return (
        f"auto over {summary['num_cells']} cells: median {100 * summary['median']:.1f} % of the best fixed setting, "
        f"worst {100 * summary['worst']:.1f} %, {summary['num_below_95_percent']} below 95 %; "
        f"at least {summary['least_speedup']:.2f} times plain decoding"
    )


if __name__ == "__main__":
    run(main)
