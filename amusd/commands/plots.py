"""Figures in Okabe and Ito's colours. The only file of the package that imports matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from amusd.commands.tables import Row, row_name
from amusd.errors import ConfigError
from amusd.files import cannot_write
from amusd.tracing.timeline import Fate, Timeline

Figure: TypeAlias = Any

INK, FAINT, PASS = "#1b1f24", "#eeeeee", "#c9c9c9"
COLOURS = {
    "autoregressive": "#56606b",
    "synchronous": "#0072b2",
    "chain": "#d55e00",
    "windowed": "#e69f00",
    "branching": "#009e73",
    "auto": "#cc79a7",
}
"""Colours of modes and policies; your own policies have that of `auto`."""
FATES: dict[Fate, tuple[str, str]] = {
    "accepted": ("#0072b2", "drafted, accepted"),
    "overtaken": ("#56b4e9", "drafted right, but too late"),
    "wasted": ("#d55e00", "drafted in vain"),
}
EDGES: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.5}
STYLE: dict[Any, Any] = {"font.size": 9.5, "legend.frameon": False, "svg.hashsalt": "amusd", "svg.fonttype": "none"}
"""Equal data give equal files."""
NUM_PASSES = 14


def write(draw: Callable[[], Figure], folder: Path, name: str) -> str:
    """Write a figure to `name.svg` and `name.png`; returns its path, or why there is no figure.

    Raises `ConfigError` when the files cannot be written.
    """
    try:
        figure = draw()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        figure.savefig(folder / f"{name}.png", dpi=160)
        return f"{folder / name}.svg and .png"
    except ConfigError as lack:
        return f"{folder / name}.svg: not drawn: {lack}"
    except OSError as error:
        raise cannot_write(folder / f"{name}.svg", error) from None


def draw_comparison(rows: Sequence[Row]) -> Figure:
    """Tokens per second of each row, with its speed-up over plain decoding."""
    figure, axes = subplots(7.0, 1.0 + 0.34 * len(rows))
    speeds = [row["tokens_per_second"] for row in rows]
    colours = [COLOURS.get(row.get("policy") or row["mode"], COLOURS["auto"]) for row in rows]
    bars = axes.barh(range(len(rows)), speeds, color=colours, height=0.75)
    gains = [f"{row['tokens_per_second']:.1f}  ({row['speedup_vs_autoregressive']:.2f}x)" for row in rows]
    axes.bar_label(bars, gains, padding=4)
    axes.set_yticks(range(len(rows)), [row_name(row) for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(speeds))
    axes.set_xlabel("tokens per second (times plain decoding, median over prompts)")
    return figure


def draw_timeline(answers: Sequence[tuple[str, Timeline]]) -> Figure:
    """The beginning of each answer on one scale: passes of the target, tokens of the draft.

    White is idle time. A pass shows its number of committed tokens, a draft step the shares of its tokens by fate.
    """
    passes = [event for _, part in answers for event in part.passes]
    shown_ms = NUM_PASSES * statistics.median(event.duration_ns for event in passes) / 1e6 if passes else 1.0
    figure, _ = subplots(9.0, 0.7 + 1.25 * len(answers), rows=len(answers))
    from matplotlib.lines import Line2D  # after `subplots`, which says that matplotlib is missing
    from matplotlib.patches import Patch

    for axes, (name, part) in zip(figure.axes, answers, strict=True):
        _draw_tracks(axes, part, shown_ms)
        axes.set_title(name, loc="left", fontsize=9.5)
    figure.axes[-1].set_xlabel("milliseconds")
    samples: list[Any] = [Patch(color=PASS, label="pass of the target, tokens committed")]
    samples += [Patch(color=colour, label=label) for colour, label in FATES.values()]
    samples.append(Line2D([], [], marker="v", linestyle="none", color=INK, label="rollback"))
    figure.legend(handles=samples, loc="outside lower center", ncols=5, fontsize=8, columnspacing=1.2)
    return figure


def _draw_tracks(axes: Any, part: Timeline, shown_ms: float) -> None:
    passes = part.passes
    begin_ns = min((event.start_ns for event in passes), default=0)
    has_draft = bool(part.draft)

    def span(event: Any) -> tuple[float, float]:
        return (event.start_ns - begin_ns) / 1e6, event.duration_ns / 1e6

    for events, bottom in ((part.target, 1.0), (part.draft, 0.0)):
        prefills = [span(event) for event in events if event.name.endswith("prefill")]
        axes.broken_barh(prefills, (bottom, 0.8), facecolors=FAINT)
    axes.broken_barh([span(event) for event in passes], (1.0, 0.8), facecolors=PASS, **EDGES)
    for event in passes:
        left, width = span(event)
        if left + width <= shown_ms:
            axes.text(left + width / 2, 1.4, f"+{event.num_tokens}", ha="center", va="center", fontsize=8)
    for step, fates in part.steps():
        bottom = 0.0
        for fate, (colour, _) in FATES.items():
            height = 0.8 * fates[fate] / max(1, step.num_tokens)
            axes.broken_barh([span(step)], (bottom, height), facecolors=colour, **EDGES)
            bottom += height
    rolled = [span(event)[0] for event in part.draft if event.name == "rollback"]
    axes.plot(rolled, [0.9] * len(rolled), "v", color=INK, markersize=4, clip_on=True)
    axes.set(xlim=(-0.03 * shown_ms, shown_ms), ylim=(-0.1, 1.9))
    axes.set_yticks([1.4, 0.4][: 1 + has_draft], ["target", "draft"][: 1 + has_draft])
    axes.tick_params(axis="y", length=0)


def subplots(width: float, height: float, rows: int = 1) -> tuple[Figure, Any]:
    """A figure (size in inches), and its axes, one above the other. Raises `ConfigError` without matplotlib."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure as MplFigure
    except ImportError:
        raise ConfigError("figures need matplotlib: pip install 'amusd[plots]'") from None
    mpl.rcParams.update(STYLE)
    figure = MplFigure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True)
    for one in figure.axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes
