"""Speed-up by category at each temperature."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

from typing import Any

from experiments.common import Document
from experiments.plotting import (
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
    """One above the other: categories for each temperature."""
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
    plotter("async_vs_sync", draw)
