"""Speed-up over the wait after a rejection."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

from typing import Any

from experiments.common import Document
from experiments.plotting import caption, lines_over, plotter, subplots


def draw(results: Document) -> Any:
    """A line for each way to decode."""
    figure, axes = subplots()
    lines_over(axes, results["jobs"], "min_candidates")
    axes.set_xlabel("min_candidates (candidates waited for)")
    axes.legend()
    figure.supxlabel(caption(results), fontsize=7)
    return figure


if __name__ == "__main__":
    plotter("wait_sweep", draw)
