"""Figures as inline SVG: bars, stacked bars and lines.

Drawn 360 units wide, the width of a phone, so that nothing has to be shrunk there. Colours come from the page's style
(`s0` ... are series), so they follow its light and dark scheme; form, dashes and labels say the same without colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from amusd.reporting.columns import percent
from amusd.reporting.markup import Html, join, tag

WIDTH = 360
NUM_SERIES = 6
"""Series that look different."""
_LEFT, _RIGHT = 44, 348
_MARKS = ("circle", "square", "diamond", "up", "down", "cross")


def bars(label: str, values: Sequence[tuple[str, float]], write: Callable[[float], str], *, reference: str) -> Html:
    """A horizontal bar for each named value, and a line at 1 called `reference`."""
    top = 1.15 * max(1.0, *(value for _, value in values))
    length = WIDTH - 60
    at_one = length / top
    height = 22 + 40 * len(values)
    parts = [tag("text", reference, x=at_one, y=12, class_="note", text_anchor="middle")]
    for index, (name, value) in enumerate(values):
        y = 34 + 40 * index
        bar = tag(
            "rect", tag("title", f"{name}: {write(value)}"), x=0, y=y + 5, width=length * value / top, height=16, rx=2,
            class_=f"s{index % NUM_SERIES}",
        )  # fmt: skip
        parts += [tag("text", name, x=0, y=y), bar]
        parts.append(tag("text", write(value), x=length * value / top + 6, y=y + 18, class_="value"))
    line = tag("line", x1=at_one, x2=at_one, y1=18, y2=height, class_="reference")
    return _svg(label, height, join(parts, line))


def stacked(label: str, stacks: Sequence[tuple[str, Mapping[str, float]]]) -> Html:
    """A bar for each name, cut into named shares of the whole."""
    names = list(dict.fromkeys(name for _, shares in stacks for name in shares))
    parts: list[Html] = []
    for index, (title, shares) in enumerate(stacks):
        y, x = 12 + 40 * index, 0.0
        parts.append(tag("text", title, x=0, y=y))
        for name, share in shares.items():
            width = WIDTH * share
            kind = names.index(name) % NUM_SERIES
            text = f"{name}: {percent(share)}"
            parts.append(
                tag("rect", tag("title", text), x=x, y=y + 5, width=max(0.0, width - 1), height=18, class_=f"s{kind}")
            )
            if width >= 36:
                parts.append(tag("text", percent(share), x=x + 5, y=y + 18, class_="inside"))
            x += width
    top = 12 + 40 * len(stacks)
    legend, height = _legend([(name, kind) for kind, name in enumerate(names)], top, marks=False)
    return _svg(label, height, join(parts, legend))


def lines(
    label: str,
    positions: Sequence[str],
    series: Sequence[tuple[str, Sequence[float | None], int]],
    write: Callable[[float], str],
    *,
    top: float,
    axis: str,
) -> Html:
    """A line for each series (name, values, look) over the same positions; None leaves a gap.

    The vertical axis goes from 0 to `top`.
    """
    base, ceiling = 170, 14
    step = (_RIGHT - _LEFT - 16) / max(1, len(positions) - 1)

    def place(index: int, value: float) -> tuple[float, float]:
        x = (_LEFT + _RIGHT) / 2 if len(positions) == 1 else _LEFT + 8 + step * index
        return x, base - (base - ceiling) * value / top

    parts: list[Html] = []
    for quarter in range(5):
        y = base - (base - ceiling) * quarter / 4
        parts.append(tag("line", x1=_LEFT, x2=_RIGHT, y1=y, y2=y, class_="grid"))
        parts.append(tag("text", write(top * quarter / 4), x=_LEFT - 6, y=y + 4, class_="note", text_anchor="end"))
    every = -(-len(positions) * max(len(position) for position in positions) // 40)  # labels must not run together
    for index, position in enumerate(positions):
        if index % every == 0:
            parts.append(tag("text", position, x=place(index, 0)[0], y=base + 16, class_="note", text_anchor="middle"))
    parts.append(tag("text", axis, x=(_LEFT + _RIGHT) / 2, y=base + 32, class_="note", text_anchor="middle"))
    for name, values, kind in series:
        points = [
            (position, value, place(i, value))
            for i, (position, value) in enumerate(zip(positions, values, strict=True))
            if value is not None
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for _, _, (x, y) in points)
        parts.append(tag("polyline", points=path, class_=f"line s{kind % NUM_SERIES}"))
        parts += [
            _mark(kind, x, y, tag("title", f"{name}, {axis} {position}: {write(value)}"))
            for position, value, (x, y) in points
        ]
    legend, height = _legend([(name, kind) for name, _, kind in series], base + 42, marks=True)
    return _svg(label, height, join(parts, legend))


def round_top(highest: float) -> float:
    """Where an axis should end that has to reach `highest`: its four steps are round numbers."""
    if highest <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(highest / 4))
    return next(4 * step * power for step in (1, 2, 2.5, 5, 10) if 4 * step * power >= highest)


def _svg(label: str, height: float, content: Html) -> Html:
    return tag("svg", content, viewBox=f"0 0 {WIDTH} {height:g}", role="img", aria_label=label)


def _legend(names: Sequence[tuple[str, int]], top: float, *, marks: bool) -> tuple[Html, float]:
    """A line for each name below `top`, and the height that the figure has with them."""
    parts: list[Html] = []
    for index, (name, kind) in enumerate(names):
        y = top + 16 + 18 * index
        if marks:
            parts += [tag("polyline", points=f"0,{y - 4:g} 24,{y - 4:g}", class_=f"line s{kind % NUM_SERIES}")]
            parts += [_mark(kind, 12, y - 4, Html())]
        else:
            parts.append(tag("rect", x=0, y=y - 11, width=12, height=12, class_=f"s{kind % NUM_SERIES}"))
        parts.append(tag("text", name, x=32 if marks else 20, y=y))
    return join(parts), top + 6 + 18 * len(names)


def _mark(kind: int, x: float, y: float, title: Html) -> Html:
    """The sign of a series at a point."""
    style = f"mark s{kind % NUM_SERIES}"
    shape = _MARKS[kind % len(_MARKS)]
    if shape == "circle":
        return tag("circle", title, cx=x, cy=y, r=4, class_=style)
    corners = {
        "square": ((-3.5, -3.5), (3.5, -3.5), (3.5, 3.5), (-3.5, 3.5)),
        "diamond": ((0, -5), (5, 0), (0, 5), (-5, 0)),
        "up": ((0, -5), (5, 4), (-5, 4)),
        "down": ((0, 5), (5, -4), (-5, -4)),
        "cross": ((-5, -1.5), (5, -1.5), (5, 1.5), (-5, 1.5)),
    }[shape]
    return tag("polygon", title, points=" ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners), class_=style)
