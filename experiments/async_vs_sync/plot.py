"""Speed-up by category at each temperature, and tokens per second of each way to use two cores."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

from typing import Any

from experiments.common import Document
from experiments.plotting import (
    LOOKS,
    SPEEDUP,
    caption,
    grouped_bars,
    legend_above,
    look,
    mark_plain,
    plotter,
    subplots,
)


def draw(results: Document) -> Any:
    """One above the other: categories for each temperature, then the accounting."""
    rows = results["categories"]
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    figure, axes = subplots(rows=len(temperatures) + 1, width=9.0, height=3.4 * (len(temperatures) + 1))
    for panel, temperature in zip(axes, temperatures, strict=False):
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
    _devices(axes[-1], results["devices"])
    figure.supxlabel(caption(results), fontsize=7)
    return figure


def _devices(axes: Any, rows: list[Document]) -> None:
    """Bars of tokens per second; a lighter part says what a core is worth."""
    names = [
        f"{row['kind'].removesuffix(' for each pass')} (T = {row['temperature']:g}; on {row['num_cores']})"
        for row in rows
    ]
    places = range(len(rows))
    colour = LOOKS["synchronous"][0]
    axes.barh(places, [row["tokens_per_second"] for row in rows], color=colour, alpha=0.35, label="in all")
    axes.barh(places, [row["tokens_per_second_per_core"] for row in rows], 0.45, color=colour, label="per core")
    axes.set_yticks(places, names, fontsize=7.5)
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second; in brackets: temperature, and cores that are occupied")
    axes.legend()


if __name__ == "__main__":
    plotter("async_vs_sync", draw)
