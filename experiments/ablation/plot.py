"""Speed-up over plain decoding with one part left out: a bar each, with the middle half of the prompts."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

from typing import Any

from experiments.common import Document
from experiments.plotting import LOOKS, OUTLINE, SPEEDUP, caption, plotter, subplots


def draw(results: Document) -> Any:
    """The first row is the whole, the others lack something."""
    rows = results["rows"]
    figure, axes = subplots(height=1.2 + 0.36 * len(rows))
    speedups = [row["speedup"] for row in rows]
    spread = [
        [row["speedup"] - row["quartiles"][0] for row in rows],
        [row["quartiles"][1] - row["speedup"] for row in rows],
    ]
    colours = [LOOKS["auto"][0], *[LOOKS["autoregressive"][0]] * (len(rows) - 1)]
    places = range(len(rows))
    axes.barh(places, speedups, color=colours, xerr=spread, ecolor=OUTLINE, error_kw={"linewidth": 0.8})
    axes.axvline(speedups[0], color=OUTLINE, linewidth=0.8, linestyle=":")
    axes.set_yticks(places, [f"without {row['left_out']}" if place else "auto" for place, row in enumerate(rows)])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(SPEEDUP)
    figure.supxlabel(caption(results), fontsize=7)
    return figure


if __name__ == "__main__":
    plotter("ablation", draw)
