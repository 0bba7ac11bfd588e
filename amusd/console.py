"""Results on standard output. All other lines are logged (`logs.py`)."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from amusd.errors import ConfigError
from amusd.files import cannot_write
from amusd.logs import write_at_once

if TYPE_CHECKING:
    from rich.console import Console as Screen


class Console:
    """Writes results for a person, or for a program if `json_only`: then standard output is one JSON document.

    If the reader has left, nothing happens; other failures to write raise `ConfigError`.
    """

    def __init__(self, *, json_only: bool = False, out: TextIO | None = None) -> None:
        self._json_only = json_only
        self._out = standard_output() if out is None else out

    def text(self, text: str, end: str = "\n") -> None:
        """Write a result for a person at once, since answers stream."""
        if not self._json_only:
            self._put(text + end)

    @contextmanager
    def streaming(self, status: Callable[[], str]) -> Iterator[Callable[[str], None]]:
        """Yield a function that writes an answer's text. On a terminal, a thread shows `status()` below."""
        screen = None if self._json_only else _screen(self._out)
        if screen is None:
            yield lambda text: self.text(text, end="")
            return
        from rich.cells import chop_cells
        from rich.live import Live
        from rich.text import Text

        paragraph = ""  # the unfinished one

        def bottom() -> Text:
            rows = chop_cells(paragraph, screen.width) or [""]  # as a terminal would break it
            line = status()[: screen.width - 5]  # room for the ^C that a terminal echoes
            return Text("\n".join([*rows[1 - screen.height :], line]))

        def write(text: str) -> None:
            nonlocal paragraph
            *whole, paragraph = (
                paragraph + "".join(one if one.isprintable() or one in "\n\t" else "\ufffd" for one in text)
            ).split("\n")
            for line in whole:
                screen.print(Text(line), soft_wrap=True)

        live = Live(get_renderable=bottom, console=screen, refresh_per_second=10, transient=True, redirect_stderr=False)
        try:
            with live:
                screen.show_cursor()  # a killed process would leave the terminal without it
                yield write
        finally:
            self._put(paragraph)

    def document(self, value: dict[str, Any]) -> None:
        """Write the result for a program: one line of JSON."""
        if self._json_only:
            self._put(json.dumps(value) + "\n")

    def _put(self, text: str) -> None:
        error = write_at_once(self._out, text)
        if error is not None and not isinstance(error, BrokenPipeError):
            raise cannot_write("standard output", error)


def standard_output() -> TextIO:
    """Standard output, made to replace characters that its encoding lacks.

    Raises `ConfigError` if it was closed (`>&-`) before this process began.
    """
    if sys.stdout is None:
        raise ConfigError("standard output: closed; redirect it to /dev/null if nobody is to read it")
    if isinstance(sys.stdout, io.TextIOWrapper):
        with suppress(OSError):  # from the flush before; the next write fails, too
            sys.stdout.reconfigure(errors="replace")
    return sys.stdout


def _screen(stream: TextIO) -> Screen | None:
    """The terminal behind `stream`; None: no terminal, or too small."""
    if not stream.isatty():
        return None
    from rich.console import Console as Screen

    screen = Screen(file=stream, force_terminal=True, highlight=False)
    has_room = screen.width >= 10 and screen.height >= 2  # COLUMNS=0
    return screen if has_room and not screen.is_dumb_terminal else None


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Text columns; the first is left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: tuple[str, ...]) -> str:
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "  ".join([cells[0].ljust(widths[0]), *rest]).rstrip()

    return "\n".join([line(header), line(tuple("-" * width for width in widths)), *(line(row) for row in rows)])


def percent(fraction: float | None) -> str:
    """`37 %`; a dash if unknown."""
    return "-" if fraction is None else f"{100 * fraction:.0f} %"
