"""Figures of the experiments, in the style of the command's own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from amusd.commands import plots
from amusd.errors import ConfigError
from experiments.common import Document, middle_half, read_results
from experiments.request import ROOT, Request, request_of

MARKERS = {"autoregressive": "s", "synchronous": "o", "chain": "^", "windowed": "P", "branching": "D", "auto": "v"}
LOOKS = {name: (plots.COLOURS[name], marker) for name, marker in MARKERS.items()}
"""Colour and marker of each way to decode."""
OUTLINE = plots.INK
SPEEDUP = "speed-up over plain decoding (times)"


def run(
    parser: argparse.ArgumentParser,
    measure: Callable[[Request, argparse.Namespace], None],
    draw: Callable[[Document], Any] | None = None,
) -> None:
    """Run a script: measure, or with `--plot` draw files of results as PNG and SVG.

    A mistake of its user is one line and exit code 2.
    """
    if draw is not None:
        text = "draw these files of results (default: all of the experiment's) instead, into the folder --out"
        parser.add_argument("--plot", type=Path, nargs="*", metavar="FILE", help=text)
    arguments = parser.parse_args()
    try:
        if draw is None or arguments.plot is None:
            measure(request_of(arguments), arguments)
            return
        home = ROOT / "experiments" / arguments.experiment
        for file in arguments.plot or sorted((home / "results").glob("*.json")):
            save(draw(read_results(file)), arguments.out or home / "figures", file.stem)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)


def subplots(*, width: float = 7.0, height: float = 4.2, rows: int = 1) -> tuple[Any, Any]:
    """`plots.subplots` with a grid."""
    figure, axes = plots.subplots(width, height, rows)
    for one in figure.axes:
        one.grid(color="#d9dee3", linewidth=0.7)
        one.set_axisbelow(True)
    return figure, axes


def save(figure: Any, folder: Path, name: str) -> None:
    """Write `name.png` and `name.svg`."""
    folder.mkdir(parents=True, exist_ok=True)
    print(plots.write(lambda: figure, folder, name), file=sys.stderr)


def look(row: Document) -> tuple[str, str]:
    """Colour and marker of a row."""
    return LOOKS[row["policy"] if row["mode"] == "asynchronous" else row["mode"]]


def mark_plain(axes: Any) -> None:
    """Draw the line at 1, the speed of plain decoding."""
    axes.axhline(1.0, color=LOOKS["autoregressive"][0], linewidth=1, linestyle=(0, (2, 3)), label="plain decoding")


def legend_above(axes: Any) -> None:
    """Put the legend above the axes, where it covers no bar."""
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)


def grouped_bars(
    axes: Any, groups: Sequence[str], series: Sequence[tuple[str, Sequence[Sequence[float]], str]]
) -> None:
    """Draw bars side by side in each group: medians, with the middle half as a line.

    `series`: name, the values of each group, colour.
    """
    width = 0.8 / len(series)
    for number, (name, values, colour) in enumerate(series):
        places = [group + (number - (len(series) - 1) / 2) * width for group in range(len(groups))]
        found = [middle_half(own) for own in values]
        middles = [middle for _, middle, _ in found]
        spread = [[middle - low for low, middle, _ in found], [high - middle for _, middle, high in found]]
        axes.bar(places, middles, 0.92 * width, color=colour, label=name)
        axes.errorbar(places, middles, spread, fmt="none", ecolor=OUTLINE, elinewidth=0.9)
    axes.set_xticks(range(len(groups)), groups)


def caption(results: Document) -> str:
    """A line for the foot of a figure: what was measured, where and when."""
    workload, machine = results["workload"], results["machine"]
    return (
        f"{workload['num_prompts']} prompts of {workload['prompts']}, up to {workload['num_tokens']} tokens; "
        f"{machine['cpu']['model']}, {machine['cpu']['allowed_cores']} cores; {results['date']}, "
        f"{(results['commit'] or 'no commit')[:7]}"
    )
