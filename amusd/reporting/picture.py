"""The timeline of one sequence as a picture for people.

Time runs to the right and then on to the next line, like text. Each line has two lanes: the passes of the target, with
a square for each candidate judged and a ring for the target's own token, and the tokens of the draft, each as long as
it took, in the colour of what became of it. Nothing drawn means that the worker waited.

The colours can be told apart with any kind of colour vision (from the palette of Okabe and Ito), and shapes repeat what
they say. The page is narrow, so that its text can be read on a phone.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from amusd.reporting import plots
from amusd.reporting.plots import INK, PALE, RULE, Artist, Axes, mark
from amusd.tracing.drafted import Fate, Step, judge_steps
from amusd.tracing.events import (
    DraftPrefill,
    DraftStep,
    Event,
    Receive,
    Rollback,
    TargetPass,
    TargetPrefill,
    VerdictTaken,
)
from amusd.tracing.messages import Flow
from amusd.tracing.timeline import Timeline

WIDTH = 640
MAX_LINES = 12
"""A longer answer is cut, and the picture says so."""
PASSES_PER_LINE = 7
"""How many passes of median length fill a line."""

ACCEPTED, REJECTED, OVERTAKEN, FAINT = "#0072b2", "#d55e00", "#56b4e9", "#f3f3f3"
FATES = {Fate.ACCEPTED: (ACCEPTED, 1.0), Fate.OVERTAKEN: (OVERTAKEN, 0.75), Fate.WASTED: (REJECTED, 0.5)}
"""Colour and height of a drafted token."""

_LEFT, _LANE_WIDTH = 70, WIDTH - 70 - 14
_LINE_HEIGHT, _AXES_TOP, _AXES_HEIGHT = 136, 16, 120
_TARGET, _DRAFT = (84, 30), (30, 20)
"""Bottom and height of each lane, in pixels above the bottom of its line's axes."""

Place: TypeAlias = "float | Sequence[float]"
"""The place of a mark on an axis; an empty sequence for a sample of the legend."""


def draw(timeline: Timeline, title: str, subtitle: Sequence[str]) -> str:
    """The picture of one sequence, as SVG. `subtitle`: lines of text below the title.

    Raises `ConfigError` without matplotlib.
    """
    stretches, is_cut = _stretches(timeline)
    notes = [*subtitle, *(["The end of the answer is cut off here."] if is_cut else [])]
    lines_top = 48 + 20 * len(notes)
    legend_top = lines_top + len(stretches) * _LINE_HEIGHT
    with plots.canvas(WIDTH, legend_top + 166) as figure:
        plots.text_at(figure, 14, 30, title, size=21, weight="bold")
        for number, note in enumerate(notes):
            plots.text_at(figure, 14, 54 + 20 * number, note, size=15)
        lines = []
        for number, (start_ns, end_ns) in enumerate(stretches):
            top = lines_top + number * _LINE_HEIGHT + _AXES_TOP
            axes = plots.axes_at(figure, _LEFT, top, _LANE_WIDTH, _AXES_HEIGHT)
            lines.append(_Line(axes, start_ns, end_ns))
        origin_ns = min((event.start_ns for event in timeline.target), default=0)
        drawing = _Drawing(origin_ns, (stretches[0][1] - stretches[0][0]) / 1e6, lines)
        drawing.everything(timeline)
        words = "Time runs to the right, then on to the next line. White: the worker waits."
        plots.text_at(figure, 14, legend_top + 14, words, size=15)
        names, samples = zip(*_samples(lines[0].axes), strict=True)
        look = {"ncols": 2, "fontsize": 15, "handlelength": 1.2, "columnspacing": 1.6, "labelspacing": 0.6}
        plots.legend_at(figure, 14, legend_top + 30, samples, names, **look)
        return plots.svg_document(figure, f"amusd: {title}")


def _stretches(timeline: Timeline) -> tuple[list[tuple[int, int]], bool]:
    """The begin and end of each line, in nanoseconds, and whether the answer goes on behind the last one.

    The first line begins shortly before the first pass or draft step, so that a long prefill does not fill lines with
    nothing. All lines but the last are equally long.
    """
    origin_ns = min((event.start_ns for event in timeline.target), default=0)
    passes = [event for event in timeline.target if isinstance(event, TargetPass)]
    if not passes:
        return [(origin_ns, origin_ns + 1_000_000)], False
    line_ns = max(1000, PASSES_PER_LINE * int(statistics.median(event.duration_ns for event in passes)))
    steps = [event for event in timeline.draft if isinstance(event, DraftStep)]
    first_ns = min(event.start_ns for event in (passes[0], *steps))
    start_ns = max(origin_ns, first_ns - line_ns // 16, passes[0].start_ns - line_ns)
    # The draft goes on until it hears that the answer has ended.
    end_ns = max(event.end_ns for event in (passes[-1], *steps)) + line_ns // 50
    cut_ns = start_ns + MAX_LINES * line_ns
    starts = range(start_ns, min(end_ns, cut_ns), line_ns)
    return [(start, min(start + line_ns, end_ns)) for start in starts], cut_ns < passes[-1].end_ns


class _Line(NamedTuple):
    """A line, and when it begins and ends."""

    axes: Axes
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class _Drawing:
    """Puts things where they belong on the lines, which have milliseconds to the right and pixels upwards."""

    origin_ns: int
    """Time 0 of the axis."""
    line_ms: float
    """Length of a whole line."""
    lines: Sequence[_Line]

    def everything(self, timeline: Timeline) -> None:
        """Lanes, spans and verdicts, those in front last."""
        for line in self.lines:
            self._lanes(line)
        for event in (*timeline.target, *timeline.draft):
            match event:
                case TargetPrefill():
                    self._span(event, _TARGET, FAINT, "prefill", "reads the prompt")
                case DraftPrefill():
                    self._span(event, _DRAFT, FAINT, "prefill", "reads the prompt")
                case TargetPass():
                    self._target_pass(event)
        for flow in timeline.to_draft:
            if flow.message == "verdict":
                self._verdict(flow, _answer_to(flow.received, timeline.draft))
        for step in judge_steps(timeline.draft, timeline.target):
            self._step(step)

    def _ms(self, at_ns: int) -> float:
        return (at_ns - self.origin_ns) / 1e6

    @property
    def _pixel_ms(self) -> float:
        return self.line_ms / _LANE_WIDTH

    def _lanes(self, line: _Line) -> None:
        """Names and base lines of the lanes, and the times."""
        axes, start_ms, end_ms = line.axes, self._ms(line.start_ns), self._ms(line.end_ns)
        axes.set(xlim=(start_ms, start_ms + self.line_ms), ylim=(0, _AXES_HEIGHT))
        axes.set_yticks([bottom + height / 2 for bottom, height in (_TARGET, _DRAFT)], ["target", "draft"])
        axes.locator_params(axis="x", nbins=8)
        last_ms = min(end_ms, start_ms + 0.97 * self.line_ms)
        ticks = [tick for tick in axes.get_xticks() if start_ms <= tick <= last_ms]
        axes.set_xticks(ticks, [f"{tick:g} ms" if tick == ticks[0] else f"{tick:g}" for tick in ticks])
        axes.tick_params(length=0, labelsize=13, labelcolor=INK, labeltop=True, labelbottom=False)
        axes.tick_params(axis="y", labelsize=15)
        axes.spines[:].set_visible(False)
        axes.vlines(ticks, _DRAFT[0], _AXES_HEIGHT, color=PALE, linewidth=1, zorder=0)
        axes.hlines([_TARGET[0], _DRAFT[0]], start_ms, end_ms, color=RULE, linewidth=1)

    def _target_pass(self, event: TargetPass) -> None:
        """A box with a square for each candidate judged, and below them a ring for the target's own token."""
        judged = f"{event.num_accepted} of {event.num_judged} candidates accepted"
        piece = self._span(event, _TARGET, PALE, "pass", f"pass: {judged}, {event.num_tokens} tokens gained")
        if piece is None:
            return
        left, width, bottom = self._ms(piece.start_ns), self._ms(piece.end_ns) - self._ms(piece.start_ns), _TARGET[0]
        pitch = min(9.5, (width / self._pixel_ms - 3) / (event.num_judged + 1))
        size = max(1.0, pitch - 1.5)
        places = [left + (3 + index * pitch + size / 2) * self._pixel_ms for index in range(event.num_judged + 1)]
        for index, place in enumerate(places[:-1]):
            kind = "accepted" if index < event.num_accepted else "rejected"
            late = index >= event.num_judged - event.num_late
            square, *_ = _candidate(piece.axes, place, bottom + 26 - size / 2, size, kind, late=late)
            mark(square, f"token {kind} late" if late else f"token {kind}")
        if event.num_tokens > event.num_accepted:
            mark(_own(piece.axes, places[event.num_accepted], bottom + 4 + size / 2, size), "token own")

    def _step(self, step: Step) -> None:
        """A box for each token of a draft step; a pale one for a step without a proposal."""
        event, count = step.event, len(step.fates)
        if not count:
            self._span(event, _DRAFT, PALE, "step", "draft step without a proposal")
        for index, fate in enumerate(step.fates):
            start_ns, end_ns = (event.start_ns + event.duration_ns * part // count for part in (index, index + 1))
            colour, share = FATES[fate]
            lane = _DRAFT[0], _DRAFT[1] * share
            part = replace(event, start_ns=start_ns, end_ns=end_ns)
            self._span(part, lane, colour, f"step {fate.value}", f"drafted token: {fate.value}", gap=0.6)

    def _verdict(self, flow: Flow, answer: VerdictTaken | None) -> None:
        """An arrow for a verdict that arrived: thin where the draft goes on, thick where it rolls back."""
        rolls_back = isinstance(answer, Rollback)
        arrived_ns = flow.received.start_ns
        for line in self._pieces(arrived_ns, arrived_ns + 1):
            sent_ms = max(self._ms(flow.sent.start_ns), line.axes.get_xlim()[0])
            tip, start = (self._ms(arrived_ns), _DRAFT[0] + 21), (sent_ms, _TARGET[0])
            look = _arrow(rolls_back=rolls_back) | {"shrinkA": 0, "shrinkB": 0}
            arrow = line.axes.annotate("", tip, start, arrowprops=look).arrow_patch
            discarded = f", {answer.num_discarded} tokens thrown away" if answer and rolls_back else ""
            kind = "verdict rollback" if rolls_back else "verdict"
            mark(arrow, kind, f"verdict, {flow.latency_ns / 1e6:.2f} ms on its way{discarded}")

    def _span(
        self, event: Event, lane: tuple[float, float], fill: str, kind: str, words: str, *, gap: float = 0.0
    ) -> _Line | None:
        """A box for each piece of a span. The longest is of this kind and is returned; the others are its `rest`."""
        pieces = self._pieces(event.start_ns, event.end_ns)
        longest = max(pieces, key=lambda piece: piece.end_ns - piece.start_ns, default=None)
        for piece in pieces:
            left = self._ms(piece.start_ns)
            width = max(0.5 * self._pixel_ms, self._ms(piece.end_ns) - left - gap * self._pixel_ms)
            box = plots.box_at(piece.axes, left, lane[0], width, lane[1], fill)
            mark(box, kind if piece is longest else "rest", f"{words} ({event.duration_ns / 1e6:.2f} ms)")
        return longest

    def _pieces(self, start_ns: int, end_ns: int) -> list[_Line]:
        """The parts of a span that lie on the lines; none when it lies outside."""
        parts = [_Line(axes, max(start_ns, first), min(end_ns, last)) for axes, first, last in self.lines]
        return [part for part in parts if part.start_ns < part.end_ns]


def _answer_to(received: Event, draft: Sequence[Event]) -> VerdictTaken | None:
    """The draft's answer to a verdict; None when a newer verdict had arrived by then."""
    for event in draft[draft.index(received) + 1 :]:
        if isinstance(event, VerdictTaken):
            return event
        if isinstance(event, Receive):
            return None
    return None


def _candidate(axes: Axes, x: Place, y: Place, size: float, kind: str, *, late: bool) -> tuple[Artist, ...]:
    """A square, with a cross where it was rejected, on a line where it came during the pass."""
    look = {"linestyle": "none", "markersize": size}
    drawn = axes.plot(x, y, marker="s", color=ACCEPTED if kind == "accepted" else REJECTED, markeredgewidth=0, **look)
    if kind == "rejected":
        drawn += axes.plot(x, y, marker="x", color="white", markeredgewidth=1.5, **look)
    if late:
        drawn += axes.plot(x, y, marker=[(-1, -1.6), (1, -1.6)], color=INK, markeredgewidth=2, **look)
    return tuple(drawn)


def _own(axes: Axes, x: Place, y: Place, size: float) -> Artist:
    """A ring."""
    look = {"linestyle": "none", "markersize": size - 1, "markerfacecolor": "white", "markeredgewidth": 1.5}
    return axes.plot(x, y, marker="o", color=INK, **look)[0]


def _arrow(*, rolls_back: bool) -> dict[str, Any]:
    colour, width = (REJECTED, 2.2) if rolls_back else ("#9a9a9a", 0.8)
    return {"arrowstyle": "-|>", "color": colour, "linewidth": width, "mutation_scale": 10}


def _samples(axes: Axes) -> list[tuple[str, Artist]]:
    """The entries of the legend: names and samples, first the target's, then the draft's."""

    def token(fate: Fate) -> Artist:
        colour, share = FATES[fate]
        return axes.plot([], [], marker="s", markersize=13 * share, color=colour, linestyle="none")[0]

    def verdict(*, rolls_back: bool) -> Artist:
        look = _arrow(rolls_back=rolls_back)
        return axes.plot([], [], marker=">", markersize=6, color=look["color"], linewidth=look["linewidth"])[0]

    return [
        ("candidate accepted", _candidate(axes, [], [], 11, "accepted", late=False)),
        ("candidate rejected", _candidate(axes, [], [], 11, "rejected", late=False)),
        ("candidate in the bonus token's place", _candidate(axes, [], [], 11, "accepted", late=True)),
        ("the target's own token", _own(axes, [], [], 11)),
        ("a pass of the target", axes.plot([], [], marker="s", markersize=14, color=PALE, linestyle="none")[0]),
        ("drafted token, accepted", token(Fate.ACCEPTED)),
        ("right, but the target was faster", token(Fate.OVERTAKEN)),
        ("drafted in vain", token(Fate.WASTED)),
        ("verdict that rolls the draft back", verdict(rolls_back=True)),
        ("verdict that agrees with the draft", verdict(rolls_back=False)),
    ]
