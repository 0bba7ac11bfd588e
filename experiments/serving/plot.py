"""Tokens per second, time to first token, time per token and goodput, over users."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

from collections.abc import Callable
from typing import Any

from experiments.common import Document
from experiments.plotting import LOOKS, caption, plotter, subplots

MODE_LOOKS = {"asynchronous": LOOKS["branching"], **LOOKS}
"""Of the modes of `run.py`; rows with other names take what is left."""


def draw(results: Document) -> Any:
    """Four panels above one another; the band of a latency reaches from its median to its 99th percentile."""
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
    plotter("serving", draw)
