"""Spans and instants of one worker, kept in memory while it decodes and written as JSON lines afterwards.

Times are `time.monotonic_ns()`, one clock for all processes of a host; the first event of a worker, `worker`, says
which host that is. Recording appends to a list: no I/O, no formatting and no lock on the hot path.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from amusd.tracing.host import host_identity

logger = logging.getLogger(__name__)

NO_SEQUENCE = -1
"""Sequence id of what belongs to none."""


class Event(NamedTuple):
    """One thing that happened: a span when `end_ns > start_ns`, else an instant."""

    name: str
    start_ns: int
    end_ns: int
    sequence_id: int
    fields: dict[str, Any]

    @property
    def duration_ns(self) -> int:
        """0 for an instant."""
        return self.end_ns - self.start_ns


class Recorder:
    """Collects the events of one worker, and is its clock. `path=None` keeps the events in memory only."""

    def __init__(self, role: str, path: Path | None = None, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.role = role
        self.now_ns = now_ns
        """The time now, in nanoseconds. A worker reads no other clock, so a test or a simulation can set the time."""
        self._path = path
        self.is_whole = True
        """Every event since the beginning is in the file, or still here."""
        self._events: list[Event] = []
        self.instant("worker", NO_SEQUENCE, host=host_identity(), pid=os.getpid())

    def span(self, name: str, start_ns: int, end_ns: int, sequence_id: int, **fields: Any) -> None:
        """Record something that took time."""
        self._events.append(Event(name, start_ns, end_ns, sequence_id, fields))

    def instant(self, name: str, sequence_id: int, **fields: Any) -> None:
        """Record something that happened now."""
        self.mark(name, sequence_id, fields)

    def mark(self, name: str, sequence_id: int, fields: dict[str, Any]) -> None:
        """As `instant`, with fields that the caller gives away."""
        now = self.now_ns()
        self._events.append(Event(name, now, now, sequence_id, fields))

    @property
    def events(self) -> tuple[Event, ...]:
        """Everything recorded since the last `flush`."""
        return tuple(self._events)

    def events_after(self, num_seen: int) -> list[Event]:
        """What was recorded behind the first `num_seen` events since the last `flush`."""
        return self._events[num_seen:]

    def flush(self) -> None:
        """Append what was recorded to the file, one JSON object a line, and forget it. Call between requests.

        Where the file cannot take it, the events are dropped, `is_whole` becomes False, and a line says so once:
        decoding goes on.
        """
        if self._path is not None and self._events:
            lines = (
                json.dumps(
                    {
                        "name": event.name,
                        "role": self.role,
                        "start_ns": event.start_ns,
                        "end_ns": event.end_ns,
                        "sequence_id": event.sequence_id,
                        **event.fields,
                    }
                )
                for event in self._events
            )
            try:
                _append(self._path, "\n".join(lines) + "\n")
            except OSError as error:
                if self.is_whole:
                    logger.warning("%s: cannot be written (%s)", self._path, error.strerror)
                self.is_whole = False
        self._events.clear()


def _append(path: Path, text: str) -> None:
    """Append all of `text` or nothing."""
    with path.open("ab") as file:
        size = file.tell()
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        with suppress(OSError):
            os.truncate(path, size)
        raise
