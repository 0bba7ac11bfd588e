"""Time per token of every system."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

from typing import Any

from experiments.common import Document, middle_half
from experiments.plotting import LOOKS, OUTLINE, caption, plotter, subplots


def draw(results: Document) -> Any:
    """A bar for each system: the median over prompts, with the middle half as a line."""
    names = [row["name"] for row in results["rows"]]
    figure, axes = subplots(width=8.5, height=0.28 * len(names) + 1.4)
    found = [middle_half([one["ms_per_token"][name] for one in results["per_prompt"]]) for name in names]
    colours = [LOOKS["branching" if name.startswith("amusd") else "autoregressive"][0] for name in names]
    middles = [middle for _, middle, _ in found]
    spread = [[middle - low for low, middle, _ in found], [high - middle for _, middle, high in found]]
    axes.barh(range(len(names)), middles, color=colours)
    axes.errorbar(middles, range(len(names)), xerr=spread, fmt="none", ecolor=OUTLINE, elinewidth=0.9)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("time per token, prefill included (ms)")
    figure.supxlabel(caption(results), fontsize=7)
    return figure


if __name__ == "__main__":
    plotter("peers", draw)
