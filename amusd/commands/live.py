"""`view=live`: below the streaming text, what the target has been doing, drawn in place.

The target knows the draft only by what arrives, so that is what the lane of the draft shows: candidates, which begin
anew once the draft has heard of a token that was not among them.

    target   one group for each pass: # a candidate accepted, x one rejected, o the target's own token; . a wait
    draft    + a candidate that fits on arrival, - one that came too late; / the draft has rolled back
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO

from amusd.tracing.drafted import RollbackWatch
from amusd.tracing.events import Event, Receive, TargetPass, TargetWait
from amusd.tracing.recorder import Recorder

REFRESH_SECONDS = 0.1
"""The lanes are drawn again this often at most."""

_REMEMBERED = 400
"""Groups of a lane that are kept: more than fit on a line."""
_COLOURS = {"#": "34", "+": "34", "x": "33", "-": "33", "/": "33", "o": "1", ".": "2"}
"""How the symbols are set off (blue, yellow, bold, dim): with colour or without, the symbol says it."""
_LEGEND = "# accepted  x rejected  o target's own  . wait  + candidate  - too late  / rolled back"
_FALLBACK_SIZE = os.terminal_size((80, 24))


@dataclass
class LiveState:
    """The events of one answer so far, as symbols and counts."""

    passes: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """Symbols of each pass and each wait, oldest first."""
    messages: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """Symbols of each candidate message."""
    num_tokens: int = 0
    num_passes: int = 0
    num_judged: int = 0
    num_accepted: int = 0
    num_rollbacks: int = 0
    num_ready: int = 0
    """Candidates that wait for the next pass."""
    first_ns: int | None = None
    last_ns: int = 0
    _rollbacks: RollbackWatch = field(default_factory=RollbackWatch)

    def take(self, event: Event) -> None:
        """Take in what happened next."""
        if isinstance(event, TargetPass):
            self._take_pass(event)
        elif isinstance(event, TargetWait):
            self.passes.append(".")
        elif isinstance(event, Receive) and event.message == "candidate":
            self._take_candidates(event)

    def _take_pass(self, event: TargetPass) -> None:
        num_tokens, num_judged, num_accepted = event.num_tokens, event.num_judged, event.num_accepted
        self.first_ns = self.first_ns or event.start_ns
        self.last_ns = event.end_ns
        self.num_passes += 1
        self.num_tokens += num_tokens
        self.num_judged += num_judged
        self.num_accepted += num_accepted
        self._rollbacks.take(event)
        self.num_ready = event.num_ready
        own = "o" * (num_tokens - num_accepted)
        self.passes.append("#" * num_accepted + "x" * (num_judged - num_accepted) + own)

    def _take_candidates(self, event: Receive) -> None:
        self.num_ready = event.num_ready or 0
        has_rolled_back = self._rollbacks.take(event)
        self.num_rollbacks += has_rolled_back
        symbols = ("+" if event.reception == "taken" else "-") * (event.num_tokens or 0)
        if has_rolled_back or symbols:
            self.messages.append("/" * has_rolled_back + symbols)


def render(state: LiveState, width: int) -> list[str]:
    """The lines to show, each at most `width` columns wide, colours aside."""
    seconds = (state.last_ns - (state.first_ns or state.last_ns)) / 1e9
    figures = [f"{state.num_tokens} tokens"]
    if seconds > 0:
        figures.append(f"{state.num_tokens / seconds:.1f} tokens/s")
    if state.num_judged:
        share = 100 * state.num_accepted / state.num_judged
        figures.append(f"{state.num_accepted} of {state.num_judged} candidates accepted ({share:.0f} %)")
    figures += [f"{state.num_ready} ready", f"{state.num_rollbacks} rollbacks"]
    return [
        "",
        _lane("target ", " ".join(state.passes), width),
        _lane("draft  ", "".join(state.messages), width),
        "; ".join(figures)[:width],
        f"\x1b[2m{_LEGEND[:width]}\x1b[0m",
    ]


def _lane(name: str, symbols: str, width: int) -> str:
    """The newest symbols that fit, the newest at the right end."""
    room = max(0, width - len(name))
    return name[:width] + _coloured(symbols[max(0, len(symbols) - room) :].rjust(room))


def _coloured(symbols: str) -> str:
    parts = []
    for index, symbol in enumerate(symbols):
        if symbol in _COLOURS and symbols[index - 1 : index] != symbol:
            parts.append(f"\x1b[0;{_COLOURS[symbol]}m")
        elif symbol == " ":
            parts.append("\x1b[0m")
        parts.append(symbol)
    return "".join(parts) + "\x1b[0m"


class TerminalScreen:
    """A terminal that knows the ANSI codes.

    The text is broken into lines here and not by the terminal, so that it is always known when it moves down onto the
    panel. A character counts at least as wide as any terminal shows it.
    """

    def __init__(self, out: TextIO, size: Callable[[], os.terminal_size] | None = None) -> None:
        self._out = out
        self._size = size or self._terminal_size
        self._column = 0
        self._panel: list[str] = []

    @property
    def width(self) -> int:
        """Columns of a line of the panel: one less than the terminal has, as terminals differ in their last one."""
        return max(1, self._size().columns - 1)

    def write(self, text: str) -> None:
        """Append to the text, at once."""
        lines = self._broken(text)
        if "\n" in lines and self._panel:
            self._out.write(f"\x1b[J{lines}{self._below()}")
        else:
            self._out.write(lines)
        self._out.flush()

    def show(self, lines: list[str]) -> None:
        """Put these lines below the text; nothing on a terminal that is too low for them."""
        self._panel = lines if self._size().lines > len(lines) + 1 else []
        self._out.write(f"\x1b[J{self._below()}")
        self._out.flush()

    def close(self) -> None:
        """Take the panel away."""
        self._out.write("\x1b[J")
        self._out.flush()
        self._panel = []

    def _below(self) -> str:
        """The panel, drawn below the cursor, which ends where it was."""
        count = len(self._panel)
        if not count:
            return ""
        # Going down scrolls where needed, so that afterwards nothing moves between saving and restoring the cursor.
        room = "\x1bD" * count + f"\x1b[{count}A"
        return room + "\x1b7" + "".join(f"\r\n{line}" for line in self._panel) + "\x1b8"

    def _broken(self, text: str) -> str:
        width, parts = self.width, []
        for character in text:
            if character == "\n":
                self._column = 0
                parts.append("\n")
                continue
            columns = 1 if character.isascii() else 2
            if self._column + columns > width:
                parts.append("\n")
                self._column = 0
            self._column += columns
            parts.append(_printable(character))
        return "".join(parts)

    def _terminal_size(self) -> os.terminal_size:
        try:
            return os.get_terminal_size(self._out.fileno())
        except (OSError, ValueError):
            return _FALLBACK_SIZE


def _printable(character: str) -> str:
    """An answer may hold control characters, which would move the cursor."""
    if character == "\t":
        return " "
    return character if character.isprintable() else "\ufffd"


class LiveView:
    """One answer on a screen, with what the target's recorder says about it."""

    def __init__(self, screen: TerminalScreen, recorder: Recorder, now: Callable[[], float] = time.monotonic) -> None:
        self._screen = screen
        self._recorder = recorder
        self._now = now
        self._state = LiveState()
        self._num_seen = 0
        self._drawn_at = float("-inf")

    def write(self, text: str) -> None:
        """Append to the answer, and draw the lanes again if it is time."""
        self._screen.write(text)
        now = self._now()
        if now - self._drawn_at < REFRESH_SECONDS:
            return
        self._drawn_at = now
        for event in self._recorder.events_after(self._num_seen):
            self._state.take(event)
            self._num_seen += 1
        self._screen.show(render(self._state, self._screen.width))

    def close(self) -> None:
        """Leave the answer alone on the screen."""
        self._screen.close()
