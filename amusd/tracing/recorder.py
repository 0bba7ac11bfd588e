"""Spans and instants of one worker, kept in memory while it decodes and written as JSON lines afterwards.

Times are `time.monotonic_ns()`, one clock for all processes of a host. Recording appends to a list: no I/O, no
formatting and no lock on the hot path.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened: a span when `end_ns > start_ns`, else an instant."""

    name: str
    start_ns: int
    end_ns: int
    sequence_id: int
    fields: dict[str, Any]


class Recorder:
    """Collects the events of one worker. `path=None` keeps them in memory only."""

    def __init__(self, role: str, path: Path | None = None) -> None:
        self.role = role
        self._path = path
        self._events: list[Event] = []

    def span(self, name: str, start_ns: int, end_ns: int, sequence_id: int, **fields: Any) -> None:
        """Record something that took time."""
        self._events.append(Event(name, start_ns, end_ns, sequence_id, fields))

    def instant(self, name: str, sequence_id: int, **fields: Any) -> None:
        """Record something that happened now."""
        now = time.monotonic_ns()
        self._events.append(Event(name, now, now, sequence_id, fields))

    @property
    def events(self) -> tuple[Event, ...]:
        """Everything recorded since the last `flush`."""
        return tuple(self._events)

    def flush(self) -> None:
        """Append what was recorded to the file, one JSON object a line, and forget it. Call between requests."""
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
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")
        self._events.clear()
