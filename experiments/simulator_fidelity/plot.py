"""Predicted over measured speed-ups, calibrated on the prompts that are measured."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

from typing import Any

from experiments.common import Document
from experiments.plotting import LOOKS, OUTLINE, caption, plotter, subplots


def draw(results: Document) -> Any:
    """A point for each setting: colour and marker by policy, filled for the first draft, open for the others."""
    rows = [row for row in results["rows"] if row["calibration"] == "same prompts"]
    figure, axes = subplots(width=5.6, height=5.2)
    drafters = list(dict.fromkeys(row["drafter"] for row in rows))
    for name in dict.fromkeys(row["policy"] for row in rows):
        colour, marker = LOOKS[name]
        for drafter in drafters:
            own = [row for row in rows if (row["policy"], row["drafter"]) == (name, drafter)]
            if own:
                axes.plot(
                    [row["measured"] for row in own],
                    [row["predicted"] for row in own],
                    marker,
                    color=colour,
                    markerfacecolor=colour if drafter == drafters[0] else "none",
                    label=f"{name}, {drafter}",
                )
    values = [row[name] for row in rows for name in ("measured", "predicted")]
    ends = [0.95 * min(values), 1.05 * max(values)]
    axes.plot(ends, ends, color=OUTLINE, linewidth=1, label="as measured")
    axes.fill_between(ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color=OUTLINE, alpha=0.08)
    axes.set(aspect="equal", xlim=ends, ylim=ends)
    axes.set_xlabel("measured speed-up over plain decoding (times)")
    axes.set_ylabel("predicted speed-up (times); grey: within 10 %")
    axes.legend(loc="upper left", fontsize=8)
    figure.supxlabel(caption(results), fontsize=7)
    return figure


if __name__ == "__main__":
    plotter("simulator_fidelity", draw)
