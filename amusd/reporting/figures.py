"""Figures of a page: bars, stacked bars and lines.

Drawn 360 pixels wide, the width of a phone, so that nothing has to be shrunk there. The colours are the page's: they
follow its light and dark scheme. Form, dashes and labels say the same without colour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from amusd.reporting.columns import percent
from amusd.reporting.page import LIGHT, Html
from amusd.reporting.plots import Artist, Figure, axes_at, canvas, inline_svg, legend_at, mark

WIDTH = 360
NUM_SERIES = 6
"""Series that look different."""
_SERIES = [LIGHT[f"s{number}"] for number in range(NUM_SERIES)]
_MARKERS = "osD^vP"
_DASHES = ((0, (1, 3)), "-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)), (0, (2, 2)))
_TEXT, _BAR, _PITCH = 12, 16, 40
"""Pixels: size of a name, height of a bar, from one bar to the next."""


def bars(label: str, values: Sequence[tuple[str, float]], write: Callable[[float], str], *, reference: str) -> Html:
    """A horizontal bar for each named value, and a line at 1 called `reference`."""
    height = 22 + _PITCH * len(values)
    length = WIDTH - 60
    with canvas(WIDTH, height) as figure:
        axes = axes_at(figure, 0, 0, length, height)
        axes.set(xlim=(0, 1.15 * max(1.0, *(value for _, value in values))), ylim=(height, 0))
        axes.axis("off")
        for index, (name, value) in enumerate(values):
            top = 34 + _PITCH * index
            axes.text(0, top, name, size=_TEXT, bbox={"facecolor": LIGHT["background"], "linewidth": 0, "pad": 1})
            (bar,) = axes.barh(top + 13, value, _BAR, color=_SERIES[index % NUM_SERIES])
            mark(bar, "bar", f"{name}: {write(value)}")
            axes.annotate(
                write(value), (value, top + 13), (6, 0), textcoords="offset points", va="center", weight="bold"
            )
        axes.plot([1, 1], [18, height], color=LIGHT["text"], linewidth=1.25, dashes=(4, 3), zorder=0)
        axes.text(1, 12, reference, ha="center", color=LIGHT["quiet"])
        return _finished(figure, label)


def stacked(label: str, stacks: Sequence[tuple[str, Mapping[str, float]]]) -> Html:
    """A bar for each name, cut into named shares of the whole."""
    parts = list(dict.fromkeys(part for _, shares in stacks for part in shares))
    top = 12 + _PITCH * len(stacks)
    with canvas(WIDTH, top + 6 + 18 * len(parts)) as figure:
        axes = axes_at(figure, 0, 0, WIDTH, top)
        axes.set(xlim=(0, 1), ylim=(top, 0))
        axes.axis("off")
        handles: dict[str, Artist] = {}
        for index, (name, shares) in enumerate(stacks):
            middle, left = 12 + _PITCH * index + 14, 0.0
            axes.text(0, middle - 14, name, size=_TEXT)
            for part, share in shares.items():
                colour = _SERIES[parts.index(part) % NUM_SERIES]
                (bar,) = axes.barh(middle, share, 18, left=left, color=colour, edgecolor=LIGHT["background"])
                mark(bar, "share", f"{part}: {percent(share)}")
                handles.setdefault(part, bar)
                if share >= 0.1:
                    axes.text(left + 5 / WIDTH, middle, percent(share), va="center", color=LIGHT["inside"])
                left += share
        legend_at(figure, 0, top + 4, [handles[part] for part in parts], parts, handlelength=1.2)
        return _finished(figure, label)


def lines(
    label: str,
    positions: Sequence[str],
    series: Sequence[tuple[str, Sequence[float | None], int]],
    write: Callable[[float], str],
    *,
    top: float,
    axis: str,
) -> Html:
    """A line for each series (name, values, look) over the same positions; a value of None is left out.

    The vertical axis goes from 0 to `top`, or a little further.
    """
    with canvas(WIDTH, 216 + 18 * len(series)) as figure:
        axes = axes_at(figure, 48, 14, 300, 156)
        axes.set(ylim=(0, 1.04 * top), xlim=(-0.3, len(positions) - 0.7))
        axes.grid(axis="y")
        axes.tick_params(length=0)
        axes.locator_params(axis="y", nbins=6)
        axes.yaxis.set_major_formatter(lambda value, _place: write(value))
        every = -(-len(positions) * max(len(position) for position in positions) // 40)  # labels must not run together
        axes.set_xticks(range(0, len(positions), every), positions[::every])
        axes.set_xlabel(axis)
        handles = []
        for name, values, look in series:
            kind = look % NUM_SERIES
            style = {"color": _SERIES[kind], "marker": _MARKERS[kind], "markeredgecolor": LIGHT["background"]}
            points = [(place, value) for place, value in enumerate(values) if value is not None]
            handles += axes.plot(*zip(*points, strict=True), linestyle=_DASHES[kind], linewidth=2, **style)
            mark(handles[-1], "series")
            for place, value in points:
                (point,) = axes.plot(place, value, linestyle="none", **style)
                mark(point, "point", f"{name}, {axis} {positions[place]}: {write(value)}")
        legend_at(figure, 0, 214, handles, [name for name, _, _ in series], handlelength=2.6)
        return _finished(figure, label)


def _finished(figure: Figure, label: str) -> Html:
    return Html(inline_svg(figure, label, {colour: f"var(--{name})" for name, colour in LIGHT.items()}))
