"""Share of the best fixed setting that `auto` reaches: a panel for each delay."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

from typing import Any

from experiments.common import Document
from experiments.plotting import plotter, subplots

LEAST = 0.85
"""Shares at or below it look alike."""


def draw(results: Document) -> Any:
    """Acceptance by draft steps a pass."""
    rows = results["rows"]
    delays, accepts, ratios = (list(dict.fromkeys(row[key] for row in rows)) for key in ("delay", "accept", "ratio"))
    shares = {(row["delay"], row["accept"], row["ratio"]): row["auto_of_best"] for row in rows}
    figure, axes = subplots(width=6.4, height=0.6 + 2.2 * len(delays), rows=len(delays))
    for panel, delay in zip(axes if len(delays) > 1 else [axes], delays, strict=True):
        values = [[shares[delay, accept, ratio] for accept in accepts] for ratio in ratios]
        panel.imshow(values, vmin=LEAST, vmax=1.05, cmap="cividis", aspect="auto", origin="lower")
        panel.grid(visible=False)
        for y, line in enumerate(values):
            for x, share in enumerate(line):
                colour = "white" if share < 0.95 else "black"
                panel.text(x, y, f"{100 * share:.0f} %", ha="center", va="center", color=colour, fontsize=8)
        panel.set_xticks(range(len(accepts)), [f"{accept:g}" for accept in accepts])
        panel.set_yticks(range(len(ratios)), [f"{ratio:g}" for ratio in ratios])
        panel.set_ylabel("draft steps a pass")
        panel.set_title(f"a message takes {delay:g} passes", fontsize=9)
    panel.set_xlabel("acceptance; cells: auto, in percent of the best fixed setting")
    workload, commit = results["workload"], str(results["commit"])[:7]
    drawn = f"{workload['num_prompts']} simulated answers of {workload['num_tokens']} tokens in each cell"
    figure.supxlabel(f"{drawn}; {results['date']}, {commit}", fontsize=7)
    return figure


if __name__ == "__main__":
    plotter("controller", draw)
