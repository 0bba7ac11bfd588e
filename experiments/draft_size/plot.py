"""Speed-up for each draft: heads of the embedded one, then shapes at equal acceptance."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

from collections.abc import Sequence
from typing import Any

from amusd.reporting.columns import row_kind
from experiments.common import Document, speedups
from experiments.plotting import SPEEDUP, caption, grouped_bars, legend_above, look, mark_plain, plotter, subplots


def draw(results: Document) -> Any:
    """Above the heads, below the shapes."""
    figure, (heads, shapes) = subplots(rows=2, height=7.0)
    _bars(heads, [job for job in results["jobs"] if job["sweep"] == "vocab_size"], "drafter.vocab_size")
    heads.set_xlabel("head of the embedded draft (tokens that it can propose)")
    legend_above(heads)
    _bars(shapes, [job for job in results["jobs"] if job["sweep"] == "shape"], "drafter.shape")
    shapes.set_xlabel(f"shape of a draft whose candidates are right with probability {results['accept']}")
    figure.supxlabel(caption(results), fontsize=7)
    return figure


def _bars(axes: Any, jobs: Sequence[Document], key: str) -> None:
    names = [job["settings"][key].replace("null", "embedded draft") for job in jobs]
    kinds = list(dict.fromkeys(row_kind(row) for job in jobs for row in job["rows"] if row["mode"] != "autoregressive"))
    series = []
    for kind in kinds:
        found = [(row, job) for job in jobs for row in job["rows"] if row_kind(row) == kind]
        values = [speedups(job["per_prompt"], row["contestant"]) for row, job in found]
        series.append((kind, values, look(found[0][0])[0]))
    grouped_bars(axes, names, series)
    mark_plain(axes)
    axes.set_ylabel(SPEEDUP)


if __name__ == "__main__":
    plotter("draft_size", draw)
