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
from typing import Any, TypeAlias

from amusd.reporting.plots import (
    INK,
    PALE,
    RULE,
    Artist,
    Axes,
    axes_at,
    box_at,
    canvas,
    legend_at,
    mark,
    svg_document,
    text_at,
)
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

Place: TypeAlias = "float | Sequence[float]"
"""Of one artist, or of none (a sample for the legend)."""

WIDTH = 640
MAX_LINES = 12
"""A longer answer is cut, and the picture says so."""
PASSES_PER_LINE = 7
"""How many passes of median length fill a line."""

ACCEPTED, REJECTED, OVERTAKEN = "#0072b2", "#d55e00", "#56b4e9"

_LEFT, _RIGHT = 70, 14
_LINE_HEIGHT = 136
_TARGET, _DRAFT = (84, 30), (30, 20)
"""Of each lane: bottom and height, in pixels above the bottom of its line's axes."""
_AXES_TOP, _AXES_HEIGHT = 16, 120
_FATES = {Fate.ACCEPTED: (ACCEPTED, 1.0), Fate.OVERTAKEN: (OVERTAKEN, 0.75), Fate.WASTED: (REJECTED, 0.5)}
"""Colour and height of a drafted token."""


def draw(timeline: Timeline, title: str, subtitle: Sequence[str]) -> str:
    """The picture of one sequence, as SVG. `subtitle`: lines of text below the title.

    Raises `ConfigError` without matplotlib.
    """
    window = _window(timeline)
    notes = [*subtitle, *(["The end of the answer is cut off here."] if window.is_cut else [])]
    lines_top = 48 + 20 * len(notes)
    legend_top = lines_top + window.num_lines * _LINE_HEIGHT
    with canvas(WIDTH, legend_top + 166) as figure:
        text_at(figure, 14, 30, title, size=21, weight="bold")
        for number, note in enumerate(notes):
            text_at(figure, 14, 54 + 20 * number, note, size=15)
        tops = [lines_top + number * _LINE_HEIGHT + _AXES_TOP for number in range(window.num_lines)]
        drawing = _Drawing(window, [axes_at(figure, _LEFT, top, WIDTH - _LEFT - _RIGHT, _AXES_HEIGHT) for top in tops])
        drawing.lanes()
        for event in (*timeline.target, *timeline.draft):
            drawing.event(event)
        for flow in timeline.to_draft:
            if flow.message == "verdict":
                drawing.verdict(flow, _answer_to(flow.received, timeline.draft))
        for step in judge_steps(timeline.draft, timeline.target):
            drawing.step(step)
        words = "Time runs to the right, then on to the next line. White: the worker waits."
        text_at(figure, 14, legend_top + 14, words, size=15)
        names, samples = zip(*_samples(drawing.lines[0]), strict=True)
        look = {"ncols": 2, "fontsize": 15, "handlelength": 1.2, "columnspacing": 1.6, "labelspacing": 0.6}
        legend_at(figure, 14, legend_top + 30, samples, names, **look)
        return svg_document(figure, f"amusd: {title}")


@dataclass(frozen=True, slots=True)
class _Window:
    """The stretch of time that is drawn, and how it is broken into lines. Nanoseconds."""

    origin_ns: int
    """Time 0 of the axis."""
    start_ns: int
    end_ns: int
    line_ns: int
    is_cut: bool

    @property
    def num_lines(self) -> int:
        return max(1, -(-(self.end_ns - self.start_ns) // self.line_ns))

    def ms(self, at_ns: int) -> float:
        """A moment on the axis."""
        return (at_ns - self.origin_ns) / 1e6

    def line(self, number: int) -> tuple[int, int]:
        """When a line begins and ends."""
        start_ns = self.start_ns + number * self.line_ns
        return start_ns, min(self.end_ns, start_ns + self.line_ns)

    def pieces(self, start_ns: int, end_ns: int) -> list[tuple[int, int, int]]:
        """A span broken at the ends of lines: line, start and end of each piece; nothing when it lies outside."""
        return [
            (number, max(start_ns, first_ns), min(end_ns, last_ns))
            for number, (first_ns, last_ns) in enumerate(map(self.line, range(self.num_lines)))
            if start_ns < last_ns and end_ns > first_ns
        ]


def _window(timeline: Timeline) -> _Window:
    """From shortly before the first pass or draft step, so that a long prefill does not fill lines with nothing."""
    passes = [event for event in timeline.target if isinstance(event, TargetPass)]
    if not passes:
        start_ns = min((event.start_ns for event in timeline.target), default=0)
        return _Window(start_ns, start_ns, start_ns + 1_000_000, 1_000_000, is_cut=False)
    origin_ns = min(event.start_ns for event in timeline.target)
    line_ns = max(1000, PASSES_PER_LINE * int(statistics.median(event.duration_ns for event in passes)))
    steps = [event for event in timeline.draft if isinstance(event, DraftStep)]
    first_ns = min(event.start_ns for event in (passes[0], *steps))
    start_ns = max(origin_ns, first_ns - line_ns // 16, passes[0].start_ns - line_ns)
    # The draft goes on until it hears that the answer has ended.
    end_ns = max(event.end_ns for event in (passes[-1], *steps)) + line_ns // 50
    cut_ns = start_ns + MAX_LINES * line_ns
    return _Window(origin_ns, start_ns, min(end_ns, cut_ns), line_ns, is_cut=cut_ns < passes[-1].end_ns)


@dataclass(frozen=True, slots=True)
class _Drawing:
    """Puts things where they belong on the lines, which have milliseconds to the right and pixels upwards."""

    window: _Window
    lines: Sequence[Axes]

    @property
    def pixel_ms(self) -> float:
        """Time that a pixel stands for."""
        return self.window.line_ns / 1e6 / (WIDTH - _LEFT - _RIGHT)

    def lanes(self) -> None:
        """Names and base lines of the lanes, and the times."""
        line_ms = self.window.line_ns / 1e6
        for number, axes in enumerate(self.lines):
            start_ms, end_ms = map(self.window.ms, self.window.line(number))
            axes.set(xlim=(start_ms, start_ms + line_ms), ylim=(0, _AXES_HEIGHT))
            axes.set_yticks([bottom + height / 2 for bottom, height in (_TARGET, _DRAFT)], ["target", "draft"])
            axes.locator_params(axis="x", nbins=8)
            ticks = [tick for tick in axes.get_xticks() if start_ms <= tick <= min(end_ms, start_ms + 0.97 * line_ms)]
            axes.set_xticks(ticks, [f"{tick:g} ms" if tick == ticks[0] else f"{tick:g}" for tick in ticks])
            axes.tick_params(length=0, labelsize=13, labelcolor=INK, labeltop=True, labelbottom=False)
            axes.tick_params(axis="y", labelsize=15)
            axes.spines[:].set_visible(False)
            axes.vlines(ticks, _DRAFT[0], _AXES_HEIGHT, color=PALE, linewidth=1, zorder=0)
            for bottom, _ in (_TARGET, _DRAFT):
                axes.hlines(bottom, start_ms, end_ms, color=RULE, linewidth=1)

    def event(self, event: Event) -> None:
        """A prefill or a pass; nothing for other events."""
        match event:
            case TargetPrefill():
                self._span(event, _TARGET, "#f3f3f3", "prefill", "reads the prompt")
            case DraftPrefill():
                self._span(event, _DRAFT, "#f3f3f3", "prefill", "reads the prompt")
            case TargetPass():
                self._target_pass(event)

    def _target_pass(self, event: TargetPass) -> None:
        """A box with a square for each candidate judged, and below them a ring for the target's own token."""
        judged = f"{event.num_accepted} of {event.num_judged} candidates accepted"
        piece = self._span(event, _TARGET, PALE, "pass", f"pass: {judged}, {event.num_tokens} tokens gained")
        if piece is None:
            return
        number, start_ns, end_ns = piece
        axes, bottom = self.lines[number], _TARGET[0]
        pitch = min(9.5, ((end_ns - start_ns) / 1e6 / self.pixel_ms - 3) / (event.num_judged + 1))
        size = max(1.0, pitch - 1.5)

        def place(index: int) -> float:
            return self.window.ms(start_ns) + (3 + index * pitch + size / 2) * self.pixel_ms

        for index in range(event.num_judged):
            kind = "accepted" if index < event.num_accepted else "rejected"
            is_late = index >= event.num_judged - event.num_late
            drawn = _candidate(
                axes, place(index), bottom + 26 - size / 2, size, accepted=kind == "accepted", late=is_late
            )
            mark(drawn[0], f"token {kind} late" if is_late else f"token {kind}")
        if event.num_tokens > event.num_accepted:
            mark(_own(axes, place(event.num_accepted), bottom + 4 + size / 2, size), "token own")

    def step(self, step: Step) -> None:
        """A box for each token of a draft step; a pale one for a step without a proposal."""
        event, count = step.event, len(step.fates)
        if not count:
            self._span(event, _DRAFT, PALE, "step", "draft step without a proposal")
        for index, fate in enumerate(step.fates):
            start_ns, end_ns = (event.start_ns + event.duration_ns * part // count for part in (index, index + 1))
            colour, share = _FATES[fate]
            lane = _DRAFT[0], _DRAFT[1] * share
            part = replace(event, start_ns=start_ns, end_ns=end_ns)
            self._span(part, lane, colour, f"step {fate.value}", f"drafted token: {fate.value}", gap=0.6)

    def verdict(self, flow: Flow, answer: VerdictTaken | None) -> None:
        """An arrow for a verdict that arrived: thin where the draft goes on, thick where it rolls back."""
        rolls_back = isinstance(answer, Rollback)
        arrived_ns = flow.received.start_ns
        for number, _, _ in self.window.pieces(arrived_ns, arrived_ns + 1):
            sent_ns = max(flow.sent.start_ns, self.window.line(number)[0])
            arrow = self.lines[number].annotate(
                "",
                (self.window.ms(arrived_ns), _DRAFT[0] + 21),
                (self.window.ms(sent_ns), _TARGET[0]),
                arrowprops=_arrow(rolls_back=rolls_back) | {"shrinkA": 0, "shrinkB": 0},
            )
            discarded = f", {answer.num_discarded} tokens thrown away" if answer and rolls_back else ""
            kind = "verdict rollback" if rolls_back else "verdict"
            mark(arrow.arrow_patch, kind, f"verdict, {flow.latency_ns / 1e6:.2f} ms on its way{discarded}")

    def _span(
        self, event: Event, lane: tuple[float, float], fill: str, kind: str, words: str, *, gap: float = 0.0
    ) -> tuple[int, int, int] | None:
        """A box for each piece of a span. The longest is of this kind and is returned; the others are its `rest`."""
        pieces = self.window.pieces(event.start_ns, event.end_ns)
        longest = max(pieces, key=lambda piece: piece[2] - piece[1], default=None)
        bottom, height = lane
        for piece in pieces:
            number, start_ns, end_ns = piece
            width_ms = max(0.5 * self.pixel_ms, (end_ns - start_ns) / 1e6 - gap * self.pixel_ms)
            box = box_at(self.lines[number], self.window.ms(start_ns), bottom, width_ms, height, fill)
            mark(box, kind if piece is longest else "rest", f"{words} ({event.duration_ns / 1e6:.2f} ms)")
        return longest


def _answer_to(received: Event, draft: Sequence[Event]) -> VerdictTaken | None:
    """What the draft did about a verdict: nothing when a newer one had arrived by then."""
    for event in draft[draft.index(received) + 1 :]:
        if isinstance(event, VerdictTaken):
            return event
        if isinstance(event, Receive):
            return None
    return None


def _candidate(axes: Axes, x: Place, y: Place, size: float, *, accepted: bool, late: bool) -> tuple[Artist, ...]:
    """A square, with a cross where it was rejected, on a line where it came during the pass."""
    look = {"linestyle": "none", "markersize": size}
    drawn = axes.plot(x, y, marker="s", color=ACCEPTED if accepted else REJECTED, markeredgewidth=0, **look)
    if not accepted:
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
    """What is drawn and what it means: first all of the target's, then all of the draft's."""

    def token(fate: Fate) -> Artist:
        colour, share = _FATES[fate]
        return axes.plot([], [], marker="s", markersize=13 * share, color=colour, linestyle="none")[0]

    def verdict(*, rolls_back: bool) -> Artist:
        look = _arrow(rolls_back=rolls_back)
        return axes.plot([], [], marker=">", markersize=6, color=look["color"], linewidth=look["linewidth"])[0]

    return [
        ("candidate accepted", _candidate(axes, [], [], 11, accepted=True, late=False)),
        ("candidate rejected", _candidate(axes, [], [], 11, accepted=False, late=False)),
        ("candidate in the bonus token's place", _candidate(axes, [], [], 11, accepted=True, late=True)),
        ("the target's own token", _own(axes, [], [], 11)),
        ("a pass of the target", axes.plot([], [], marker="s", markersize=14, color=PALE, linestyle="none")[0]),
        ("drafted token, accepted", token(Fate.ACCEPTED)),
        ("right, but the target was faster", token(Fate.OVERTAKEN)),
        ("drafted in vain", token(Fate.WASTED)),
        ("verdict that rolls the draft back", verdict(rolls_back=True)),
        ("verdict that agrees with the draft", verdict(rolls_back=False)),
    ]
