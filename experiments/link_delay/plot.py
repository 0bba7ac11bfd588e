"""Speed-up over the delay of the link."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

from typing import Any

from experiments.common import Document
from experiments.plotting import draw_lines, plotter


def draw(results: Document) -> Any:
    """A line for each way to decode."""
    return draw_lines(results, "transport.delay_ms", "added delay of a message, one way (ms)")


if __name__ == "__main__":
    plotter("link_delay", draw)
