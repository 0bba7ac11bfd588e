"""The events of one worker, kept in memory while it decodes and written as JSON lines afterwards.

Times are nanoseconds of `Clock.now_ns`. Recording appends to a list: no I/O, formatting or lock on the hot path.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from msgspec import json

from amusd.clock import MONOTONIC, Clock
from amusd.logs import logger
from amusd.protocol.messages import Candidate, Features, Message, Verdict
from amusd.tracing.events import EVENT_CLASSES, NO_SEQUENCE, Event, EventName

SEQUENCES_PER_RUN = 1 << 32
"""Run `i` has the sequence ids from `i * SEQUENCES_PER_RUN` on."""

_encoder = json.Encoder()


class Recorder:
    """Collects the events of one worker, and is its clock.

    An event belongs to the run of its sequence; without a sequence, to the run of the event before it.
    """

    def __init__(self, role: str, events: str | None = None, clock: Clock = MONOTONIC) -> None:
        """`events`: the folder of a run's events, such as `/sweep/{run}/events`, as `as_format` writes it.

        None: events go to listeners alone.
        """
        self.role = role
        self.now_ns = clock.now_ns
        """The time in nanoseconds, by the worker's only clock."""
        self.events_path = events
        self.listeners: tuple[Callable[[Event], None], ...] = ()
        """Called with each event in the worker's thread; a listener returns at once and raises nothing."""
        self._recorded: list[Event] = []
        self._run = 0
        self.is_whole = True
        """False: a file lacks events."""

    def span(self, name: EventName, start_ns: int, end_ns: int, sequence_id: int, **fields: Any) -> None:
        """Record something that took time."""
        event = EVENT_CLASSES[name](name, start_ns, end_ns, sequence_id, **fields)
        if self.events_path is not None:
            self._recorded.append(event)
        for listener in self.listeners:
            listener(event)

    def instant(self, name: EventName, sequence_id: int, **fields: Any) -> None:
        """Record something that happened now."""
        now = self.now_ns()
        self.span(name, now, now, sequence_id, **fields)

    def message(self, name: Literal["send", "receive"], message: Message, reception: str | None = None) -> None:
        """Record `message` before it is sent or after it was received."""
        fields = {field: getattr(message, field, None) for field in ("first", "base", "start", "epoch")}
        if isinstance(message, Features):
            fields["num_tokens"] = message.end - message.start
        elif isinstance(message, (Candidate, Verdict)):
            fields["num_tokens"] = len(message.token_ids)
        sequence_id = getattr(message, "sequence_id", NO_SEQUENCE)
        self.instant(name, sequence_id, message=type(message).__name__.lower(), reception=reception, **fields)

    @property
    def folder(self) -> Path | None:
        """Where the events of the latest run go."""
        return None if self.events_path is None else _folder_of(self.events_path, self._run)

    def flush(self) -> None:
        """Append recorded events to the file of their run, one JSON object a line, and forget them.

        Call between requests. If writing fails, `is_whole` becomes False, and one line says so if the
        run's folder exists.
        """
        runs: dict[int, list[Event]] = {}
        for event in self._recorded if self.events_path is not None else ():
            if event.sequence_id >= 0:
                self._run = event.sequence_id // SEQUENCES_PER_RUN
            runs.setdefault(self._run, []).append(event)
        for run, events in runs.items():
            self._write(run, events)
        self._recorded.clear()

    def _write(self, run: int, events: list[Event]) -> None:
        assert self.events_path is not None
        path = _folder_of(self.events_path, run) / f"{self.role}.jsonl"
        try:
            path.parent.mkdir(exist_ok=True)
            with path.open("ab") as file:
                file.write(_encoder.encode_lines(events))
        except OSError as error:
            if self.is_whole and path.parent.parent.is_dir():  # else the run was refused, and its folder is gone
                logger.warning("%s: cannot be written (%s)", path, error.strerror)
            self.is_whole = False


def as_format(path: Path) -> str:
    """The path as a format string, to which `/{run}/events` may be added.

    Braces are doubled. Each byte becomes a character: text in a message must be UTF-8, a path need not.
    """
    return os.fsencode(path).decode("latin-1").replace("{", "{{").replace("}", "}}")


def _folder_of(text: str, run: int) -> Path:
    return Path(os.fsdecode(text.format(run=run).encode("latin-1")))
