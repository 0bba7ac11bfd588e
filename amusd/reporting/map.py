"""The map of which policy wins where, as a picture: acceptance to the right, draft steps per target pass upwards.

Each cell has the colour of its winner. The colours are those of Okabe and Ito, which can be told apart with any kind of
colour vision, and dark text can be read on all of them. Measured runs are numbered rings, named below.
"""

from __future__ import annotations

import bisect
import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amusd.config import RunConfig, SimulateConfig
from amusd.errors import ConfigError
from amusd.reporting.plots import INK, Artist, Axes, axes_at, box_at, canvas, legend_at, mark, svg_document, text_at
from amusd.simulation.calibration import Calibration
from amusd.simulation.calibration_file import load_calibration
from amusd.types import Mode

MAP_FILE = "map.svg"

NAMES_AND_COLOURS = {
    "autoregressive": ("plain", "#c9c9c9"),
    "synchronous": ("synchronous", "#f0e442"),
    "chain": ("chain", "#56b4e9"),
    "branching": ("branching", "#e69f00"),
    "windowed": ("windowed", "#cc79a7"),
    "auto": ("auto", "#2fb58c"),
}
"""Every mode and policy that may win: its name on the map and its colour, in the order of the legend."""
USES = {
    "draft": ("as a draft", "#2fb58c"),
    "rank": ("as a rank", "#56b4e9"),
    "replica": ("as a replica", "#e69f00"),
}
"""The same of the uses of the draft's device."""

_LOOKS = NAMES_AND_COLOURS | USES
_POLICIES_NOTE = (
    "the fastest policy's speed-up over plain decoding and, below it, what it gains over the best synchronous block "
    "length"
)
_USES_NOTE = (
    "the best use's speed-up over plain decoding on the target's devices and, below it, what the draft gains over "
    "the better of the two other uses"
)
_UNITS = {
    "ratio": "draft steps per target pass",
    "batch_size": "answers at a time",
    "num_target_devices": "devices of the target",
}
"""Words for what the map goes over upwards, by key of a cell."""
_LEFT, _RIGHT = 84, 14
_MIN_CELL_WIDTH, _CELL_HEIGHT, _GAP = 74, 62, 2
_MIN_WIDTH = 640
_RING = 20.0
_LINE = 20
_LETTER_WIDTH = 8.6
"""Average width of a letter of 15 pixels, in a wide font."""
_BASELINES = ((20.0, 54.0), (17.0, 33.0), (40.0, 56.0))
"""Baselines, in pixels from the top of a cell, of its two texts."""
_TEXT_HALF_WIDTH = 24


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """One drafter of one run: where it stands on the map, and what won there."""

    run_dir: str
    drafter: str
    accept: float
    """Share of the draft's tokens that were right."""
    ratio: float
    """Draft steps per target pass."""
    winner: str | None
    """Mode, or policy where it is asynchronous; None where the run compared nothing."""
    speedup: float | None
    """Speed-up of the winner over plain decoding."""


def measured_points(config: RunConfig, calibration: Calibration | None) -> tuple[MeasuredPoint, ...]:
    """The calibrating run first, then those of `simulate.points`; a directory that is named twice once.

    Raises `ConfigError` for a directory that shows no draft.
    """
    known = {} if config.calibration is None or calibration is None else {Path(config.calibration): calibration}
    for path in map(Path, config.simulate.points):
        if path not in known:
            known[path] = load_calibration(path, config.drafter.kind, key="simulate.points")
    return tuple(_point(path, measured) for path, measured in known.items())


def _point(run_directory: Path, measured: Calibration) -> MeasuredPoint:
    winner, speedup = _winner(_rows(run_directory), measured.drafter)
    return MeasuredPoint(
        run_dir=str(run_directory),
        drafter=measured.drafter,
        accept=measured.acceptance,
        ratio=measured.costs.steps_per_pass,
        winner=winner,
        speedup=speedup,
    )


def _rows(run_directory: Path) -> Sequence[Mapping[str, Any]]:
    """The rows of a comparison; none where the run was something else."""
    path = run_directory / "result.json"
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):  # the latter: a calibration file
        return ()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    rows: Sequence[Mapping[str, Any]] = result.get("rows", ())
    return rows


def _winner(rows: Sequence[Mapping[str, Any]], drafter: str) -> tuple[str | None, float | None]:
    rows = [row for row in rows if row.get("layout", "pair") == "pair"]
    own = [row for row in rows if row.get("drafter") == drafter]
    if not own:
        return None, None
    plain = [row for row in rows if row["mode"] == Mode.AUTOREGRESSIVE.value]
    best = max([*plain, *own], key=lambda row: float(row["speedup_vs_autoregressive"]))
    return str(best["policy"] or best["mode"]), float(best["speedup_vs_autoregressive"])


@dataclass(frozen=True, slots=True)
class Axis:
    """Values at the centres of cells that stand side by side; between them a position is interpolated."""

    values: tuple[float, ...]
    """Ascending, each once."""
    cell: float
    """Length of one."""

    @classmethod
    def of(cls, values: Sequence[float], cell: float) -> Axis:
        """An axis over values in any order, with repetitions."""
        return cls(tuple(sorted(set(values))), cell)

    @property
    def length(self) -> float:
        """Length of all cells together."""
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
    """The picture of a result of `amusd simulate` with its `grid` and its `points`, as SVG.

    Raises `ConfigError` without matplotlib.
    """
    cells: Sequence[Mapping[str, Any]] = result["grid"]
    points: Sequence[Mapping[str, Any]] = result["points"]
    accepts = [cell["accept"] for cell in cells]
    across = Axis.of(accepts, max(_MIN_CELL_WIDTH, (_MIN_WIDTH - _LEFT - _RIGHT) / len(set(accepts))))
    key, heading = _up_axis(settings)
    is_of_uses = settings.rank_speedup is not None
    title = "What the draft's device is worth" if is_of_uses else "Which policy wins where"
    up = Axis.of([math.log2(cell[key]) for cell in cells], _CELL_HEIGHT)
    pass_ms = None if key != "ratio" else float(_pass_time(result["inputs"])["mean_ms"])
    width = round(_LEFT + across.length + _RIGHT)
    notes = _wrapped(
        f"In each cell {_USES_NOTE if is_of_uses else _POLICIES_NOTE}. Simulated, not measured.",
        width,
    )
    caption = _wrapped(_caption(result["inputs"], settings), width)
    grid_top = 82 + _LINE * len(notes)
    legend_top = grid_top + up.length + 66
    points_top = legend_top + 34
    caption_top = points_top + 26 * len(points) + 20
    with canvas(width, round(caption_top + _LINE * len(caption) + 4)) as figure:
        text_at(figure, 14, 30, title, size=21, weight="bold")
        for number, line in enumerate(notes):
            text_at(figure, 14, 54 + _LINE * number, line, size=15)
        text_at(figure, 14, grid_top - 14, heading, size=15)
        axes = axes_at(figure, _LEFT, grid_top, across.length, up.length)
        _draw_axes(axes, across, up, pass_ms)
        places = [(across.place(point["accept"]), up.place(math.log2(point["ratio"]))) for point in points]
        for cell in cells:
            _draw_cell(axes, across, up, cell, key, places)
        for number, ((x, y), point) in enumerate(zip(places, points, strict=True), start=1):
            mark(_draw_ring(axes, x, y, number), "point", _words(point))
            below = points_top + 26 * (number - 1)
            _draw_ring(axes, 14 + _RING / 2 - _LEFT, grid_top + up.length - below - 9, number)
            text_at(figure, 42, below + 14, _words(point), size=15)
        policies = [look for name, look in _LOOKS.items() if name in cells[0]["speedups"]]
        samples = [axes.bar(0, 0, color=colour) for _, colour in policies]
        look = {"fontsize": 15, "handlelength": 1.2, "columnspacing": 1.4}
        legend_at(figure, 14, legend_top, samples, [name for name, _ in policies], ncols=len(policies), **look)
        for number, line in enumerate(caption):
            text_at(figure, 14, caption_top + _LINE * number, line, size=15)
        return svg_document(figure, f"amusd: {title[0].lower()}{title[1:]}")


def _up_axis(settings: SimulateConfig) -> tuple[str, str]:
    """The key of a cell that the map goes over upwards, and the heading of that axis."""
    if settings.grid_batch_sizes:
        return "batch_size", _UNITS["batch_size"]
    if settings.grid_target_devices:
        return "num_target_devices", f"{_UNITS['num_target_devices']}, beside one for the draft"
    return "ratio", f"{_UNITS['ratio']} (time of a step)"


def _draw_axes(axes: Axes, across: Axis, up: Axis, pass_ms: float | None) -> None:
    """Ticks at the middles of cells: pixels from the lower left corner of the grid. Ratios have the time of a step."""
    axes.set(xlim=(0, across.length), ylim=(0, up.length))
    values = [2**exponent for exponent in up.values]
    names = [f"{value:.4g}" + (f"\n{pass_ms / value:.3g} ms" if pass_ms is not None else "") for value in values]
    axes.set_yticks([up.place(exponent) for exponent in up.values], names)
    axes.set_xticks([across.place(accept) for accept in across.values], [f"{accept:g}" for accept in across.values])
    axes.set_xlabel("acceptance: share of the draft's tokens that are right", size=15, color=INK)
    axes.tick_params(length=0, labelsize=15, labelcolor=INK)
    axes.tick_params(axis="y", labelsize=14)
    axes.spines[:].set_visible(False)


def _draw_cell(
    axes: Axes, across: Axis, up: Axis, cell: Mapping[str, Any], key: str, rings: Sequence[tuple[float, float]]
) -> None:
    """Its texts make way for the rings of measured runs; `key` names its value on the axis `up`."""
    speedups, winner = cell["speedups"], cell["winner"]
    centre, middle = across.place(cell["accept"]), up.place(math.log2(cell[key]))
    left, bottom, top = centre - across.cell / 2, middle - up.cell / 2, middle + up.cell / 2
    _, colour = _LOOKS[winner]
    box = box_at(axes, left + _GAP / 2, bottom + _GAP / 2, across.cell - _GAP, up.cell - _GAP, colour)
    each = ", ".join(f"{_LOOKS[name][0]} {speedup:.2f}" for name, speedup in speedups.items())
    unit = _UNITS[key]
    place = f"acceptance {cell['accept']:g}, {cell[key]:g} {unit}"
    mark(box, f"cell {winner}", f"{place}: {each}")
    near = [top - y for x, y in rings if abs(x - centre) < _TEXT_HALF_WIDTH + _RING / 2]
    upper, lower = _baselines([y for y in near if abs(y - up.cell / 2) < (up.cell + _RING) / 2])
    axes.text(centre, top - upper, f"{speedups[winner]:.2f}", size=17, weight="bold", ha="center")
    gain = cell["gain"] if winner in USES else speedups[winner] / speedups["synchronous"] - 1
    axes.text(centre, top - lower, f"{100 * gain:+.0f} %", size=13, ha="center")


def _draw_ring(axes: Axes, x: float, y: float, number: int) -> Artist:
    """A ring with its number; the ring is returned."""
    look = {"markersize": _RING - 1.5, "markerfacecolor": "white", "markeredgewidth": 1.5}
    (ring,) = axes.plot(x, y, marker="o", linestyle="none", color=INK, zorder=2.5, **look)
    axes.text(x, y - 4.5, str(number), size=13, ha="center")
    return ring


def _baselines(rings: Sequence[float]) -> tuple[float, float]:
    """The places of the two texts that keep farthest from rings at these heights."""
    return max(_BASELINES, key=lambda both: min((abs(ring + 5 - y) for ring in rings for y in both), default=0.0))


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
        f"{to_target:.3g} ms{back}. {_schedules(settings)} "
        f"{settings.num_answers} answers of {settings.num_tokens} tokens, seed {settings.seed}."
    )


def _schedules(settings: SimulateConfig) -> str:
    """What was tried, and by which law of ranks."""
    blocks = _listed(settings.synchronous_lengths)
    if settings.rank_speedup is None:
        waits = _listed(settings.min_candidates)
        return f"Each policy at its best of: blocks of {blocks} tokens, waits for {waits} candidates."
    return (
        f"As a draft: auto; else plain decoding or blocks of {blocks} tokens. Twice the devices make a pass "
        f"{settings.rank_speedup:.3g} times as fast; speed of the draft's device: {settings.draft_device_speed:g}."
    )


def _listed(values: Sequence[int]) -> str:
    """`1, 2, 4`, or `1 to 7` for a run of numbers."""
    found = sorted(set(values))
    if len(found) > 2 and found[-1] - found[0] == len(found) - 1:
        return f"{found[0]} to {found[-1]}"
    return ", ".join(map(str, found))


def _pass_time(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The time of the pass with the fewest candidates, draft at rest: the map counts draft steps per such pass."""
    passes = inputs["costs"]["target_pass"]
    narrowest = passes[min(passes, key=int)]
    apart: Mapping[str, Any] = narrowest.get("draft_and_target_apart", narrowest)
    return apart


def _wrapped(words: str, width: int) -> list[str]:
    return textwrap.wrap(words, int((width - 28) / _LETTER_WIDTH))
