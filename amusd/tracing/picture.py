"""The timeline of one sequence as a picture for people.

Time runs to the right and then on to the next line, like text. Each line has two lanes: the passes of the target, with
a square for each candidate judged and a ring for the target's own token, and the tokens of the draft, each as long as
it took, in the colour of what became of it. Nothing drawn means that the worker waited.

The colours can be told apart with any kind of colour vision (from the palette of Okabe and Ito), and shapes repeat what
they say. The page is narrow, so that its text can be read on a phone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from xml.etree import ElementTree as ET

from amusd.tracing import svg
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
from amusd.tracing.timeline import Timeline

WIDTH = 640
MAX_LINES = 12
"""A longer answer is cut, and the picture says so."""
PASSES_PER_LINE = 7
"""How many passes of median length fill a line."""

ACCEPTED, REJECTED, OVERTAKEN = "#0072b2", "#d55e00", "#56b4e9"

_LEFT, _RIGHT = 70, 14
_LINE_HEIGHT = 136
_TARGET_TOP, _TARGET_HEIGHT = 22, 30
_DRAFT_TOP, _DRAFT_HEIGHT = 86, 20
_BOTTOM = _DRAFT_TOP + _DRAFT_HEIGHT
_SQUARE = 8.0
_LEGEND_ROW = 26
_TICKS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
_FATES = {Fate.ACCEPTED: (ACCEPTED, 1.0), Fate.OVERTAKEN: (OVERTAKEN, 0.75), Fate.WASTED: (REJECTED, 0.5)}
"""Colour and height of a drafted token."""


def draw(timeline: Timeline, title: str, subtitle: Sequence[str]) -> str:
    """The picture of one sequence, as SVG. `subtitle`: lines of text below the title."""
    window = _window(timeline)
    notes = [*subtitle, *(["The end of the answer is cut off here."] if window.is_cut else [])]
    lines_top = 48 + 20 * len(notes)
    legend_top = lines_top + window.num_lines * _LINE_HEIGHT
    page = svg.document(WIDTH, legend_top + _LEGEND_HEIGHT, f"amusd: {title}")
    svg.text(page, 14, 30, title, "title")
    for number, note in enumerate(notes):
        svg.text(page, 14, 54 + 20 * number, note, "text")
    lines = [svg.group(page, 0, lines_top + number * _LINE_HEIGHT) for number in range(window.num_lines)]
    drawing = _Drawing(window, lines)
    drawing.axes()
    drawing.prefills(timeline)
    drawing.verdicts(timeline)
    for event in _passes(timeline):
        drawing.target_pass(event)
    for step in judge_steps(timeline.draft, timeline.target):
        drawing.step(step)
    _draw_legend(svg.group(page, 0, legend_top))
    return ET.tostring(page, encoding="unicode") + "\n"


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a span that lies on one line."""

    line: int
    left: float
    right: float


@dataclass(frozen=True, slots=True)
class _Window:
    """The stretch of time that is drawn, and how it is broken into lines."""

    origin_ns: int
    """Time 0 of the axis."""
    start_ns: int
    end_ns: int
    line_ns: int
    is_cut: bool

    @property
    def num_lines(self) -> int:
        return max(1, -(-(self.end_ns - self.start_ns) // self.line_ns))

    def line_start(self, line: int) -> int:
        return self.start_ns + line * self.line_ns

    def line_end(self, line: int) -> int:
        return min(self.end_ns, self.line_start(line + 1))

    def x(self, at_ns: int, line: int) -> float:
        """Where a moment stands, as seen from a line; left or right of the lane if it is on another one."""
        return _LEFT + (at_ns - self.line_start(line)) / self.line_ns * (WIDTH - _LEFT - _RIGHT)

    def pieces(self, start_ns: int, end_ns: int) -> list[_Piece]:
        """A span, broken at the ends of lines; nothing when it lies outside."""
        return [
            _Piece(line, self.x(max(start_ns, self.line_start(line)), line), self.x(end, line))
            for line in range(self.num_lines)
            if start_ns < (end := min(end_ns, self.line_end(line))) and end > self.line_start(line)
        ]


def _window(timeline: Timeline) -> _Window:
    """From shortly before the first pass or draft step, so that a long prefill does not fill lines with nothing."""
    passes = _passes(timeline)
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


def _passes(timeline: Timeline) -> list[TargetPass]:
    return [event for event in timeline.target if isinstance(event, TargetPass)]


@dataclass(frozen=True, slots=True)
class _Drawing:
    """Puts things where they belong on the lines."""

    window: _Window
    lines: Sequence[ET.Element]

    def axes(self) -> None:
        """Names and base lines of the lanes, and the ticks."""
        window = self.window
        tick_ms = next((tick for tick in _TICKS_MS if window.line_ns / 1e6 / tick <= 8), _TICKS_MS[-1])
        for number, group in enumerate(self.lines):
            end_x = window.x(window.line_end(number), number)
            first_ns, last_ns = window.line_start(number) - window.origin_ns, window.line_end(number) - window.origin_ns
            tick_ns = int(tick_ms * 1_000_000)
            for count, at_ns in enumerate(range(-(-first_ns // tick_ns) * tick_ns, last_ns + 1, tick_ns)):
                x = window.x(window.origin_ns + at_ns, number)
                svg.line(group, x, 16, x, _BOTTOM, colour=svg.PALE)
                if x < WIDTH - _RIGHT - 12:
                    unit = " ms" if count == 0 else ""
                    svg.text(group, x, 11, f"{at_ns // 1_000_000}{unit}", "small", anchor="middle")
            for top, height, name in ((_TARGET_TOP, _TARGET_HEIGHT, "target"), (_DRAFT_TOP, _DRAFT_HEIGHT, "draft")):
                svg.text(group, _LEFT - 10, top + height / 2 + 5, name, "text", anchor="end")
                svg.line(group, _LEFT, top + height, end_x, top + height, colour=svg.RULE)

    def prefills(self, timeline: Timeline) -> None:
        """Reading the prompt, as far as it is shown."""
        for event in (*timeline.target, *timeline.draft):
            if isinstance(event, TargetPrefill):
                self._span(event, _TARGET_TOP, _TARGET_HEIGHT, svg.FAINT, "prefill", "reads the prompt")
            elif isinstance(event, DraftPrefill):
                self._span(event, _DRAFT_TOP, _DRAFT_HEIGHT, svg.FAINT, "prefill", "reads the prompt")

    def target_pass(self, event: TargetPass) -> None:
        """A box with a square for each candidate judged, and below them a ring for the target's own token."""
        num_judged, num_accepted = event.num_judged, event.num_accepted
        words = f"pass: {num_accepted} of {num_judged} candidates accepted, {event.num_tokens} tokens gained"
        piece = self._span(event, _TARGET_TOP, _TARGET_HEIGHT, svg.PALE, "pass", words)
        if piece is None:
            return
        pitch = min(_SQUARE + 1.5, (piece.right - piece.left - 3) / (num_judged + 1))
        size = max(1.0, pitch - 1.5)
        group = self.lines[piece.line]
        for index in range(num_judged):
            late = index >= num_judged - event.num_late
            x = piece.left + 3 + index * pitch
            _draw_candidate(group, x, _TARGET_TOP + 4, size, accepted=index < num_accepted, late=late)
        if event.num_tokens > num_accepted:
            _draw_own(group, piece.left + 3 + num_accepted * pitch, _TARGET_TOP + _TARGET_HEIGHT - size - 4, size)

    def step(self, step: Step) -> None:
        """A box for each token of a draft step; a pale one for a step without a proposal."""
        event, count = step.event, len(step.fates)
        if not count:
            self._span(event, _DRAFT_TOP, _DRAFT_HEIGHT, svg.PALE, "step", "draft step without a proposal")
        for index, fate in enumerate(step.fates):
            part = replace(
                event,
                start_ns=event.start_ns + event.duration_ns * index // count,
                end_ns=event.start_ns + event.duration_ns * (index + 1) // count,
            )
            colour, share = _FATES[fate]
            height = _DRAFT_HEIGHT * share
            top = _BOTTOM - height
            self._span(part, top, height, colour, f"step {fate.value}", f"drafted token: {fate.value}", gap=0.6)

    def verdicts(self, timeline: Timeline) -> None:
        """An arrow for each verdict that arrived: thin where the draft goes on, thick where it rolls back."""
        received = [flow for flow in timeline.to_draft if flow.message == "verdict"]
        for flow in received:
            answer = _answer_to(flow.received, timeline.draft)
            rolls_back = isinstance(answer, Rollback)
            for piece in self.window.pieces(flow.received.start_ns, flow.received.start_ns + 1):
                sent_x = max(_LEFT, self.window.x(flow.sent.start_ns, piece.line))
                colour, width = (REJECTED, 2.2) if rolls_back else (svg.RULE, 0.8)
                arrow = svg.arrow(
                    self.lines[piece.line],
                    sent_x,
                    _TARGET_TOP + _TARGET_HEIGHT,
                    piece.left,
                    _DRAFT_TOP - 1,
                    colour=colour,
                    width=width,
                    kind="verdict rollback" if rolls_back else "verdict",
                )
                latency_ms = (flow.received.start_ns - flow.sent.start_ns) / 1e6
                discarded = f", {answer.num_discarded} tokens thrown away" if answer and rolls_back else ""
                svg.hint(arrow, f"verdict, {latency_ms:.2f} ms on its way{discarded}")

    def _span(
        self, event: Event, top: float, height: float, fill: str, kind: str, words: str, *, gap: float = 0.0
    ) -> _Piece | None:
        """A box for each piece of a span. The longest is of this kind and is returned; the others are its `rest`."""
        pieces = self.window.pieces(event.start_ns, event.end_ns)
        longest = max(pieces, key=lambda piece: piece.right - piece.left, default=None)
        for piece in pieces:
            width = max(0.5, piece.right - piece.left - gap)
            kind_here = kind if piece is longest else "rest"
            box = svg.rectangle(self.lines[piece.line], piece.left, top, width, height, fill=fill, kind=kind_here)
            svg.hint(box, f"{words} ({event.duration_ns / 1e6:.2f} ms)")
        return longest


def _answer_to(received: Event, draft: Sequence[Event]) -> VerdictTaken | None:
    """What the draft did about a verdict: nothing when a newer one had arrived by then."""
    for event in draft[draft.index(received) + 1 :]:
        if isinstance(event, VerdictTaken):
            return event
        if isinstance(event, Receive):
            return None
    return None


def _draw_candidate(parent: ET.Element, x: float, y: float, size: float, *, accepted: bool, late: bool) -> None:
    kind = "accepted" if accepted else "rejected"
    token = svg.group(parent, x, y, f"token {kind} late" if late else f"token {kind}")
    svg.rectangle(token, 0, 0, size, size, fill=ACCEPTED if accepted else REJECTED)
    if not accepted:
        svg.cross(token, 0, 0, size)
    if late:
        svg.line(token, 0, size + 2.5, size, size + 2.5, colour=svg.INK, width=2)


def _draw_own(parent: ET.Element, x: float, y: float, size: float) -> None:
    svg.ring(svg.group(parent, x, y, "token own"), 0, 0, size)


def _draft_sample(fate: Fate) -> Callable[[ET.Element], object]:
    colour, share = _FATES[fate]
    return lambda group: svg.rectangle(group, 2, 16 - 16 * share, 12, 16 * share, fill=colour)


_LEGEND: Sequence[tuple[str, Callable[[ET.Element], object]]] = (
    ("candidate accepted", lambda group: _draw_candidate(group, 3, 3, 11, accepted=True, late=False)),
    ("drafted token, accepted", _draft_sample(Fate.ACCEPTED)),
    ("candidate rejected", lambda group: _draw_candidate(group, 3, 3, 11, accepted=False, late=False)),
    ("drafted in vain", _draft_sample(Fate.WASTED)),
    ("candidate in the bonus token's place", lambda group: _draw_candidate(group, 3, 0, 11, accepted=True, late=True)),
    ("right, but the target was faster", _draft_sample(Fate.OVERTAKEN)),
    ("the target's own token", lambda group: _draw_own(group, 3, 3, 11)),
    (
        "verdict that rolls the draft back",
        lambda group: svg.arrow(group, 4, -2, 12, 18, colour=REJECTED, width=2.2, kind="sample"),
    ),
    ("a pass of the target", lambda group: svg.rectangle(group, 0, 1, 18, 14, fill=svg.PALE)),
    (
        "verdict that agrees with the draft",
        lambda group: svg.arrow(group, 4, -2, 12, 18, colour=svg.RULE, width=0.8, kind="sample"),
    ),
)
"""What it means, and how to draw a sample 18 wide and 16 high. Left the target's, right the draft's."""
_LEGEND_HEIGHT = _LEGEND_ROW * (len(_LEGEND) // 2 + 1) + 14


def _draw_legend(parent: ET.Element) -> None:
    svg.text(parent, 14, 14, "Time runs to the right, then on to the next line. White: the worker waits.", "text")
    for number, (words, sample) in enumerate(_LEGEND, start=2):
        row, column = divmod(number, 2)
        entry = svg.group(parent, 14 + 320 * column, 4 + _LEGEND_ROW * row, "legend")
        sample(entry)
        svg.text(entry, 28, 14, words, "text")
