"""The map of which policy wins where, as a picture: acceptance to the right, draft steps per target pass upwards.

Each cell has the colour of its winner. The colours are those of Okabe and Ito, which can be told apart with any kind of
colour vision, and dark text can be read on all of them. Measured runs are numbered rings, named below.
"""

from __future__ import annotations

import bisect
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree as ET

from amusd.config import SimulateConfig
from amusd.tracing import svg

MAP_FILE = "map.svg"

NAMES_AND_COLOURS = {
    "autoregressive": ("plain", "#c9c9c9"),
    "synchronous": ("synchronous", "#f0e442"),
    "chain": ("chain", "#56b4e9"),
    "branching": ("branching", "#e69f00"),
    "windowed": ("windowed", "#cc79a7"),
    "auto": ("auto", "#2fb58c"),
}
"""Of every mode and policy that may win, in the order of the legend."""

_LEFT, _RIGHT = 84, 14
_MIN_CELL_WIDTH, _CELL_HEIGHT, _GAP = 74, 62, 2
_MIN_WIDTH = 640
_RING = 20.0
_LINE = 20
_LETTER_WIDTH = 8.6
"""Of texts of the class `text`, on average, in a wide font."""
_BASELINES = ((20.0, 54.0), (17.0, 33.0), (40.0, 56.0))
"""Where the two texts of a cell may stand."""
_TEXT_HALF_WIDTH = 24


@dataclass(frozen=True, slots=True)
class Axis:
    """Values at the centres of cells that stand side by side; between them a position is interpolated."""

    values: tuple[float, ...]
    """Ascending, each once."""
    cell: float
    """Length of one."""

    @classmethod
    def of(cls, values: Sequence[float], cell: float) -> Axis:
        """In any order, with repetitions."""
        return cls(tuple(sorted(set(values))), cell)

    @property
    def length(self) -> float:
        """Of all cells."""
        return self.cell * len(self.values)

    def place(self, value: float) -> float:
        """Distance from the start; what lies beyond the outermost cells is put on their edge."""
        return min(max(self.cell * self._cells_before(value), 0.0), self.length)

    def _cells_before(self, value: float) -> float:
        if len(self.values) == 1:
            return 0.5 + float(value > self.values[0]) - float(value < self.values[0])
        index = min(max(bisect.bisect_right(self.values, value) - 1, 0), len(self.values) - 2)
        lower, upper = self.values[index : index + 2]
        return index + 0.5 + (value - lower) / (upper - lower)


def draw_map(result: Mapping[str, Any], settings: SimulateConfig) -> str:
    """The picture of a result of `amusd simulate` with its `grid` and its `points`, as SVG."""
    cells: Sequence[Mapping[str, Any]] = result["grid"]
    points: Sequence[Mapping[str, Any]] = result["points"]
    accepts = [cell["accept"] for cell in cells]
    num_columns = len(set(accepts))
    across = Axis.of(accepts, max(_MIN_CELL_WIDTH, (_MIN_WIDTH - _LEFT - _RIGHT) / num_columns))
    up = Axis.of([math.log2(cell["ratio"]) for cell in cells], _CELL_HEIGHT)
    width = round(_LEFT + across.length + _RIGHT)
    legend = [name for name in NAMES_AND_COLOURS if name in cells[0]["speedups"]]
    notes = _wrapped(
        "In each cell the fastest policy's speed-up over plain decoding and, below it, what it gains over the best "
        "synchronous block length. Simulated, not measured.",
        width,
    )
    caption = _wrapped(_caption(result["inputs"], settings), width)
    grid_top = 82 + _LINE * len(notes)
    legend_top = grid_top + up.length + 62
    points_top = legend_top + 34
    caption_top = points_top + 26 * len(points) + 8
    page = svg.document(width, round(caption_top + _LINE * len(caption) + 4), "amusd: which policy wins where")
    svg.text(page, 14, 30, "Which policy wins where", "title")
    _draw_lines(page, 54, notes)
    pass_ms = float(_pass_time(result["inputs"])["mean_ms"])
    grid = svg.group(page, _LEFT, grid_top)
    _draw_axes(grid, across, up, pass_ms)
    places = [(across.place(point["accept"]), up.length - up.place(math.log2(point["ratio"]))) for point in points]
    for cell in cells:
        _draw_cell(grid, across, up, cell, places)
    _draw_legend(svg.group(page, 14, legend_top), legend)
    for number, (point, (x, y)) in enumerate(zip(points, places, strict=True), start=1):
        _draw_ring(grid, x, y, number, "point")
        entry = svg.group(page, 14, points_top + 26 * (number - 1), "measured")
        _draw_ring(entry, _RING / 2, 9, number, None)
        svg.text(entry, 28, 14, _words(point), "text")
    _draw_lines(page, caption_top + 12, caption)
    return ET.tostring(page, encoding="unicode") + "\n"


def _draw_axes(grid: ET.Element, across: Axis, up: Axis, pass_ms: float) -> None:
    svg.text(grid, 14 - _LEFT, -14, "draft steps per target pass (time of a step)", "text")
    for exponent in up.values:
        middle, ratio = up.length - up.place(exponent), 2**exponent
        svg.text(grid, -10, middle - 1, f"{ratio:.4g}", "text", anchor="end")
        svg.text(grid, -10, middle + 16, f"{pass_ms / ratio:.3g} ms", "small", anchor="end")
    for accept in across.values:
        svg.text(grid, across.place(accept), up.length + 20, f"{accept:g}", "text", anchor="middle")
    title = "acceptance: share of the draft's tokens that are right"
    svg.text(grid, across.length / 2, up.length + 44, title, "text", anchor="middle")


def _draw_cell(
    grid: ET.Element, across: Axis, up: Axis, cell: Mapping[str, Any], rings: Sequence[tuple[float, float]]
) -> None:
    """Its texts make way for the rings of measured runs."""
    speedups, winner = cell["speedups"], cell["winner"]
    centre, middle = across.place(cell["accept"]), up.length - up.place(math.log2(cell["ratio"]))
    _, colour = NAMES_AND_COLOURS[winner]
    group = svg.group(grid, centre - across.cell / 2, middle - up.cell / 2, f"cell {winner}")
    svg.rectangle(group, _GAP / 2, _GAP / 2, across.cell - _GAP, up.cell - _GAP, fill=colour)
    near = [y - middle + up.cell / 2 for x, y in rings if abs(x - centre) < _TEXT_HALF_WIDTH + _RING / 2]
    upper, lower = _baselines([y for y in near if abs(y - up.cell / 2) < (up.cell + _RING) / 2])
    svg.text(group, across.cell / 2, upper, f"{speedups[winner]:.2f}", "strong", anchor="middle")
    gain = 100 * (speedups[winner] / speedups["synchronous"] - 1)
    svg.text(group, across.cell / 2, lower, f"{gain:+.0f} %", "value", anchor="middle")
    each = ", ".join(f"{NAMES_AND_COLOURS[name][0]} {speedup:.2f}" for name, speedup in speedups.items())
    svg.hint(group, f"acceptance {cell['accept']:g}, {cell['ratio']:g} draft steps per target pass: {each}")


def _baselines(rings: Sequence[float]) -> tuple[float, float]:
    """Those that keep farthest from rings at these heights."""
    return max(_BASELINES, key=lambda both: min((abs(ring + 5 - y) for ring in rings for y in both), default=0.0))


def _draw_legend(parent: ET.Element, policies: Sequence[str]) -> None:
    x = 0.0
    for policy in policies:
        name, colour = NAMES_AND_COLOURS[policy]
        entry = svg.group(parent, x, 0, "legend")
        svg.rectangle(entry, 0, 1, 18, 16, fill=colour)
        svg.text(entry, 26, 14, name, "text")
        x += 48 + _LETTER_WIDTH * len(name)


def _draw_ring(parent: ET.Element, x: float, y: float, number: int, kind: str | None) -> None:
    group = svg.group(parent, x, y, kind)
    svg.ring(group, -_RING / 2, -_RING / 2, _RING)
    svg.text(group, 0, 4.5, str(number), "small", anchor="middle")


def _draw_lines(page: ET.Element, top: float, lines: Sequence[str]) -> None:
    for number, line in enumerate(lines):
        svg.text(page, 14, top + _LINE * number, line, "text")


def _words(point: Mapping[str, Any]) -> str:
    winner = point["winner"]
    place = f"acceptance {point['accept']:.2f}, {point['ratio']:.1f} steps a pass"
    if winner is None:
        return f"measured: {point['drafter']}, {place}; nothing was compared"
    name, _ = NAMES_AND_COLOURS.get(winner, (winner, ""))
    return f"measured: {point['drafter']}, {place}; {name} won, {point['speedup']:.2f}"


def _caption(inputs: Mapping[str, Any], settings: SimulateConfig) -> str:
    costs = inputs["costs"]
    to_target, to_draft = costs["to_target"]["mean_ms"], costs["to_draft"]["mean_ms"]
    back = "" if to_target == to_draft else f" to the target, {to_draft:.3g} ms back"
    pass_ms = _pass_time(inputs)
    spread = "as measured" if pass_ms["num_samples"] > 1 else "always the same"
    jitter = f"varying by {100 * settings.jitter:g} %" if settings.jitter else spread
    return (
        f"Inputs: a target pass of {pass_ms['mean_ms']:.3g} ms, {jitter}; a message takes "
        f"{to_target:.3g} ms{back}. Each policy at its best of: blocks of "
        f"{_listed(settings.synchronous_lengths)} tokens, waits for {_listed(settings.min_candidates)} candidates. "
        f"{settings.num_answers} answers of {settings.num_tokens} tokens, seed {settings.seed}."
    )


def _listed(values: Sequence[int]) -> str:
    """`1, 2, 4`, or `1 to 7` for a run of numbers."""
    found = sorted(set(values))
    if len(found) > 2 and found[-1] - found[0] == len(found) - 1:
        return f"{found[0]} to {found[-1]}"
    return ", ".join(map(str, found))


def _pass_time(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of the pass that the map's draft steps are measured by: the one with the fewest candidates, draft at rest."""
    passes = inputs["costs"]["target_pass"]
    narrowest = passes[min(passes, key=int)]
    apart: Mapping[str, Any] = narrowest.get("draft_and_target_apart", narrowest)
    return apart


def _wrapped(words: str, width: int) -> list[str]:
    return textwrap.wrap(words, int((width - 28) / _LETTER_WIDTH))
