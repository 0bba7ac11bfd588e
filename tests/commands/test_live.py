"""The live view: what it says about a real answer, and that the text on the screen stays the answer's."""

from __future__ import annotations

import io
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime.pair import PROMPT, decoding, oracle, pair, params
from runtime.table_tree import TableTreeDrafter, spread
from tracing.runs import made

from amusd.commands.generate import live_view
from amusd.commands.live import LiveState, LiveView, TerminalScreen, render
from amusd.config import RunConfig
from amusd.console import Console
from amusd.drafters.synthetic import right_with_probability
from amusd.tracing.events import Event
from amusd.tracing.recorder import Recorder
from amusd.types import Mode

CODE = re.compile(r"\x1b\[([0-9;]*)([A-Za-z])|\x1b([D78])")


class Terminal:
    """A small terminal with the codes that the view uses; keeps what scrolls out at the top."""

    def __init__(self, columns: int, lines: int) -> None:
        self.columns, self.lines = columns, lines
        self.cells = [[" "] * columns for _ in range(lines)]
        self.scrolled: list[str] = []
        self.row = self.column = 0
        self.saved = (0, 0)

    def feed(self, output: str) -> None:
        at = 0
        while at < len(output):
            code = CODE.match(output, at)
            if code:
                self.obey(code)
                at = code.end()
            else:
                self.put(output[at])
                at += 1

    def put(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self.column = 0
            self.down()
        else:
            assert self.column < self.columns - 1, "wrote into the last column"
            self.cells[self.row][self.column] = character
            self.column += 1

    def down(self) -> None:
        if self.row < self.lines - 1:
            self.row += 1
        else:
            self.scrolled.append("".join(self.cells.pop(0)))
            self.cells.append([" "] * self.columns)

    def obey(self, code: re.Match[str]) -> None:
        number, letter = code.group(1), code.group(2) or code.group(3)
        if letter == "D":
            self.down()
        elif letter == "7":
            self.saved = (self.row, self.column)
        elif letter == "8":
            self.row, self.column = self.saved
        elif letter == "A":
            assert self.row >= int(number)
            self.row -= int(number)
        elif letter == "J":
            self.cells[self.row][self.column :] = [" "] * (self.columns - self.column)
            for row in range(self.row + 1, self.lines):
                self.cells[row] = [" "] * self.columns
        else:
            assert letter == "m"

    @property
    def shown(self) -> list[str]:
        """Every line, those that scrolled out included, without trailing blanks."""
        return [line.rstrip() for line in (*self.scrolled, *("".join(row) for row in self.cells))]


@given(
    pieces=st.lists(st.text("ab \n", max_size=9), max_size=30),
    columns=st.integers(4, 30),
    lines=st.integers(2, 12),
    redrawn=st.lists(st.booleans(), min_size=30, max_size=30),
)
def test_the_text_on_the_screen_is_the_text_in_any_terminal(
    pieces: list[str], columns: int, lines: int, redrawn: list[bool]
) -> None:
    terminal, out = Terminal(columns, lines), io.StringIO()
    screen = TerminalScreen(out, lambda: os.terminal_size((columns, lines)))
    for piece, draws in zip(pieces, redrawn, strict=False):
        screen.write(piece)
        if draws:
            screen.show(["=" * screen.width, "panel"[: screen.width]])
    terminal_before_close = Terminal(columns, lines)
    terminal_before_close.feed(out.getvalue())
    screen.close()
    terminal.feed(out.getvalue())
    text = "".join(pieces)
    expected = [
        line[start : start + columns - 1]
        for line in text.split("\n")
        for start in range(0, max(1, len(line)), columns - 1)
    ]
    shown = terminal.shown
    assert shown[: len(expected)] == [line.rstrip() for line in expected]
    assert not any(shown[len(expected) :])
    if lines > 3 and pieces and any(redrawn[: len(pieces)]):
        below = terminal_before_close.shown[len(expected) :]
        assert below[0] == "=" * (columns - 1)
        assert below[1] == "panel"[: columns - 1]


def test_control_characters_of_an_answer_do_not_reach_the_terminal() -> None:
    out = io.StringIO()
    TerminalScreen(out, lambda: os.terminal_size((40, 9))).write("a\x1b[2Jb\rc\td")
    assert out.getvalue() == "a\ufffd[2Jb\ufffdc d"


def test_a_wide_character_never_reaches_the_last_column() -> None:
    out = io.StringIO()
    TerminalScreen(out, lambda: os.terminal_size((6, 9))).write("漢字漢")
    assert out.getvalue() == "漢字\n漢"


class Remembering:
    """A screen that keeps what it is given."""

    width = 200

    def __init__(self) -> None:
        self.text = ""
        self.shown: list[list[str]] = []
        self.closed = False

    def write(self, text: str) -> None:
        self.text += text

    def show(self, lines: list[str]) -> None:
        self.shown.append(lines)

    def close(self) -> None:
        self.closed = True


def plain(line: str) -> str:
    return CODE.sub("", line)


def test_a_real_answer_is_shown_as_it_was() -> None:
    """Counts of symbols equal the metrics, once all events were taken in."""
    factory = oracle(40, right_with_probability(0.7, 5))
    with pair({"oracle": factory}, pass_seconds=0.002) as (engine, _):
        answer = engine.generate(PROMPT, params(40), decoding=decoding(Mode.ASYNCHRONOUS, 8))
        events = engine.worker.recorder.events
    state = LiveState()
    for event in events:
        state.take(event)
    metrics = answer.metrics
    symbols = "".join(state.passes)
    assert symbols.count("#") == metrics.num_accepted == state.num_accepted
    assert symbols.count("x") == metrics.num_verified - metrics.num_accepted
    assert symbols.count("o") == metrics.num_tokens - metrics.num_accepted
    assert state.num_tokens == metrics.num_tokens
    assert 0 < state.num_rollbacks <= metrics.draft.num_rollbacks + 1  # type: ignore[union-attr]
    assert "".join(state.messages).count("/") > 0
    lines = [plain(line) for line in render(state, 300)]
    assert f"{metrics.num_accepted} of {metrics.num_verified} candidates accepted" in lines[3]
    assert lines[1].endswith(state.passes[-1])


def candidate(base: int, count: int, reception: str = "taken", ready: int = 0) -> Event:
    return made("receive", 0, 0, message="candidate", num_tokens=count, base=base, reception=reception, num_ready=ready)


def target_pass(committed: int, tokens: int, judged: int, accepted: int, ready: int = 0) -> Event:
    fields = {"committed_length": committed, "num_tokens": tokens, "num_judged": judged, "num_accepted": accepted}
    return made("target_pass", 1_000_000_000, 3_000_000_000, **fields, num_ready=ready)


def test_an_example_by_hand() -> None:
    state = LiveState()
    events = [candidate(5, 3, ready=3), made("target_wait", 0, 1, 1), target_pass(8, 3, 3, 2)]
    for event in [*events, candidate(5, 1, "stale"), candidate(8, 2, ready=2)]:
        state.take(event)
    assert [plain(line) for line in render(state, 60)][1:4] == [
        "target " + ". ##xo".rjust(53),
        "draft  " + "+++-/++".rjust(53),
        "3 tokens; 1.5 tokens/s; 2 of 3 candidates accepted (67 %); 2"[:60],
    ]
    assert state.num_ready == 2
    assert state.num_rollbacks == 1


def test_a_tree_rolls_back_once_the_draft_has_heard_what_was_not_in_it() -> None:
    state = LiveState()
    events = [
        *[candidate(5, 3, ready=2), target_pass(8, 3, 2, 2, ready=0)],  # as far as it went, it was right
        *[candidate(8, 2, ready=2), target_pass(9, 1, 2, 0), candidate(8, 1, "contradicted"), candidate(9, 2, ready=1)],
        *[target_pass(11, 2, 1, 1), candidate(9, 1, "contradicted"), candidate(11, 1, ready=1)],
        *[target_pass(12, 1, 1, 0), candidate(11, 1, ready=1), candidate(12, 1, ready=1)],  # a late one had it
    ]
    for event in events:
        state.take(event)
    assert "".join(state.messages) == "+++++-/++-/+++"
    assert state.num_rollbacks == 2
    assert state.num_ready == 1


def test_the_default_policy_fills_the_drafts_lane_and_counts_its_rollbacks() -> None:
    """As `view=live` shows it by default: `auto`, with a draft that can branch."""
    schedule = decoding(Mode.ASYNCHRONOUS, 8, policy="auto", fan_out=3, rows_per_step=3)
    tree = {"tree": lambda: TableTreeDrafter(places=spread(4, 0.5, 0.3))}
    screen = Remembering()
    with pair({}, tree, pass_seconds=0.004) as (engine, draft):
        view = LiveView(screen, engine.worker.recorder, iter(range(1000)).__next__)
        answer = engine.stream(PROMPT, params(40), decoding=schedule)
        for token in answer:
            view.write(token.text)
        metrics = answer.generation.metrics
    assert draft.error is None
    lane, figures = (plain(screen.shown[-1][line]) for line in (2, 3))
    assert "+" in lane
    assert "/" in lane
    num_rollbacks = int(re.search(r"(\d+) rollbacks", figures)[1])  # type: ignore[index]
    assert 0 < num_rollbacks <= metrics.num_passes
    assert len([frame for frame in screen.shown if "+" in plain(frame[2])]) > len(screen.shown) / 2


def test_without_a_terminal_it_says_so_in_one_line_and_goes_on_plain() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console(out=out, err=err)
    with pair({}) as (engine, _):
        assert live_view(RunConfig(view="live"), engine, console) is None
        assert err.getvalue() == "view=live: needs a terminal for its output; going on plain\n"
        assert live_view(RunConfig(), engine, console) is None
    assert out.getvalue() == ""
    assert err.getvalue().count("\n") == 1


@pytest.mark.parametrize("width", [1, 3, 8, 20, 79])
def test_no_line_is_wider_than_the_screen(width: int) -> None:
    state = LiveState()
    for number in range(100):
        state.take(candidate(5 + number, 3))
        state.take(target_pass(8 + number, 3, 3, 2))
    assert all(len(plain(line)) <= width for line in render(state, width))


def test_the_lanes_are_drawn_ten_times_a_second_at_most() -> None:
    screen, recorder = Remembering(), Recorder("target")
    now = [0.0]
    view = LiveView(screen, recorder, lambda: now[0])
    for number in range(100):
        recorder.span("target_pass", number, number + 1, 1, **target_pass(8 + number, 1, 0, 0).fields)
        view.write("word ")
        now[0] += 1 / 128
    view.close()
    assert screen.text == "word " * 100
    assert len(screen.shown) == 8  # with step 0, 13, 26 ... 91
    assert "92 tokens" in plain(screen.shown[-1][3])
    assert screen.closed
