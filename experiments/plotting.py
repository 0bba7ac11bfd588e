"""Figures of the experiments. The only file of them that imports matplotlib."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from amusd.errors import ConfigError
from experiments.common import Document, middle_half, read_results, row_kind, run, speedups
from experiments.request import ROOT

LOOKS = {
    "autoregressive": ("#56606b", "s"),
    "synchronous": ("#0072b2", "o"),
    "chain": ("#d55e00", "^"),
    "windowed": ("#e69f00", "P"),
    "branching": ("#009e73", "D"),
    "auto": ("#cc79a7", "v"),
}
"""Colour (of Okabe and Ito's palette, told apart by colour-blind readers) and marker of each way to decode."""
DASHES = ("-", "--", ":")
"""One for each drafter."""
OUTLINE = "#1b1f24"
STYLE = {
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#d9dee3",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "amusd",  # the same results give the same file
}
SPEEDUP = "speed-up over plain decoding (times)"


def plotter(experiment: str, draw: Callable[[Document], Any]) -> None:
    """Run a `plot.py`: read results, let `draw` make a matplotlib figure of each file, write one PNG and one SVG."""
    home = ROOT / "experiments" / experiment
    parser = argparse.ArgumentParser(
        prog=f"python experiments/{experiment}/plot.py", description="Draw the files of results as PNG and SVG."
    )
    parser.add_argument("results", type=Path, nargs="*", help="default: all of the experiment's results/*.json")
    parser.add_argument("--out", type=Path, default=home / "figures", help="folder of the figures")
    arguments = parser.parse_args()

    def main() -> None:
        files = arguments.results or sorted((home / "results").glob("*.json"))
        if not files:
            raise ConfigError(f"experiments/{experiment}/results/: nothing to draw; run the experiment first")
        for file in files:
            save(draw(read_results(file)), arguments.out, file.stem)

    run(main)


def subplots(*, width: float = 7.0, height: float = 4.2, rows: int = 1) -> tuple[Any, Any]:
    """A figure and its axes, one above the other. Raises `ConfigError` without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError("figures need matplotlib: pip install matplotlib") from None
    from matplotlib.figure import Figure

    mpl.rcParams.update(STYLE)
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, 1)


def save(figure: Any, folder: Path, name: str) -> None:
    """Write `name.png` and `name.svg`."""
    folder.mkdir(parents=True, exist_ok=True)
    for path, metadata in ((folder / f"{name}.png", {}), (folder / f"{name}.svg", {"Date": None})):
        figure.savefig(path, dpi=160, metadata=metadata)
        print(path, file=sys.stderr)


def look(row: Document) -> tuple[str, str]:
    """Colour and marker of a row."""
    return LOOKS[row["policy"] if row["mode"] == "asynchronous" else row["mode"]]


def draw_lines(results: Document, key: str, label: str) -> Any:
    """The figure of a sweep over one key, which the horizontal axis shows as `label`."""
    figure, axes = subplots()
    lines_over(axes, results["jobs"], key)
    axes.set_xlabel(label)
    axes.legend()
    figure.supxlabel(caption(results), fontsize=7)
    return figure


def lines_over(axes: Any, jobs: Sequence[Document], key: str, *, convert: Callable[[str], float] = float) -> None:
    """Draw speed-ups over a swept key, with the middle half of prompts as a band; synchronous: the best length."""
    kinds: dict[str, list[tuple[float, Document, Document]]] = {}
    for job in jobs:
        for row in job["rows"]:
            if row["mode"] != "autoregressive":
                kinds.setdefault(row_kind(row), []).append((convert(job["settings"][key]), row, job))
    drafters = list(dict.fromkeys(row["drafter"] for points in kinds.values() for _, row, _ in points))
    for kind, points in kinds.items():
        points.sort(key=lambda point: point[0])
        colour, marker = look(points[0][1])
        dash = DASHES[drafters.index(points[0][1]["drafter"]) % len(DASHES)]
        places = [place for place, _, _ in points]
        found = [middle_half(speedups(job["per_prompt"], row["contestant"])) for _, row, job in points]
        axes.plot(places, [middle for _, middle, _ in found], dash, color=colour, marker=marker, label=kind)
        axes.fill_between(
            places, [low for low, _, _ in found], [high for _, _, high in found], color=colour, alpha=0.12
        )
    mark_plain(axes)
    axes.set_ylabel(SPEEDUP)


def mark_plain(axes: Any) -> None:
    """The line at 1."""
    axes.axhline(1.0, color=LOOKS["autoregressive"][0], linewidth=1, linestyle=(0, (2, 3)), label="plain decoding")


def legend_above(axes: Any) -> None:
    """A legend that covers no bar."""
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)


def grouped_bars(
    axes: Any, groups: Sequence[str], series: Sequence[tuple[str, Sequence[Sequence[float]], str]]
) -> None:
    """Bars beside each other in each group: medians, with the middle half as a line.

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
    """What was measured, where and when, for the foot of a figure."""
    workload, machine = results["workload"], results["machine"]
    return (
        f"{workload['num_prompts']} prompts of {workload['prompts']}, up to {workload['num_tokens']} tokens; "
        f"{machine['cpu']['model']}, {machine['cpu']['allowed_cores']} cores; {results['date']}, "
        f"{(results['commit'] or 'no commit')[:7]}"
    )
