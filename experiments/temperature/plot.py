"""Speed-up over temperature."""

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
    lines_over(axes, results["jobs"], "sampling.temperature")
    axes.set_xlabel("temperature (no unit)")
    axes.legend()
    figure.supxlabel(caption(results), fontsize=7)
    return figure


if __name__ == "__main__":
    plotter("temperature", draw)
