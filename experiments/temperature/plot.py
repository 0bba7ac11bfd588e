"""Speed-up over temperature."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

from typing import Any

from experiments.common import Document
from experiments.plotting import draw_lines, plotter


def draw(results: Document) -> Any:
    """A line for each way to decode."""
    return draw_lines(results, "sampling.temperature", "temperature (no unit)")


if __name__ == "__main__":
    plotter("temperature", draw)
