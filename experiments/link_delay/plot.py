"""Speed-up over the delay of the link."""

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
    lines_over(axes, results["jobs"], "transport.delay_ms")
    axes.set_xlabel("added delay of a message, one way (ms)")
    axes.legend()
    figure.supxlabel(caption(results), fontsize=7)
    return figure


if __name__ == "__main__":
    plotter("link_delay", draw)
