"""Spans and instants of one worker, kept in memory while it decodes and written as JSON lines afterwards.

Times are `time.monotonic_ns()`, one clock for all processes of a host; the first event of a worker, `worker`, says
which host that is. Recording appends to a list: no I/O, no formatting and no lock on the hot path. Names and fields are
those of `tracing/events.py`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from amusd.tracing.events import NO_SEQUENCE, Event, event_of

logger = logging.getLogger(__name__)

SEQUENCES_PER_RUN = 1 << 32
"""Run `i` has the sequence ids from `i * SEQUENCES_PER_RUN` on."""

Record: TypeAlias = "tuple[str, int, int, int, dict[str, Any]]"
"""Name, start, end, sequence id and fields of an event, as `event_of` takes them."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Recorder:
    """Collects the events of one worker, and is its clock. `path=None` keeps the events in memory only."""

    def __init__(self, role: str, path: Path | None = None, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.role = role
        self.now_ns = now_ns
        """The time now, in nanoseconds. A worker reads no other clock, so a test or a simulation can set the time."""
        self._path = path
        self.is_whole = True
        """Every event since the beginning is in the file, or still here."""
        self.listeners: tuple[Callable[[Record], None], ...] = ()
        """Called with each event in the worker's thread: they must return at once, and raise nothing."""
        self._records: list[Record] = []
        self.instant("worker", NO_SEQUENCE, host=_host_identity(), pid=os.getpid())

    def span(self, name: str, start_ns: int, end_ns: int, sequence_id: int, **fields: Any) -> None:
        """Record something that took time."""
        self._add((name, start_ns, end_ns, sequence_id, fields))

    def instant(self, name: str, sequence_id: int, **fields: Any) -> None:
        """Record something that happened now."""
        self.mark(name, sequence_id, fields)

    def mark(self, name: str, sequence_id: int, fields: dict[str, Any]) -> None:
        """Record an instant with fields that the caller gives away: they are not copied."""
        now = self.now_ns()
        self._add((name, now, now, sequence_id, fields))

    def _add(self, record: Record) -> None:
        self._records.append(record)
        for listener in self.listeners:
            listener(record)

    @property
    def events(self) -> tuple[Event, ...]:
        """Everything recorded since the last `flush`."""
        return tuple(event_of(*record) for record in self._records)

    def flush(self) -> None:
        """Append what was recorded to the file, one JSON object a line, and forget it. Call between requests.

        Where the file cannot take it, the events are dropped, `is_whole` becomes False, and a line says so once:
        decoding goes on.
        """
        if self._path is not None and self._records:
            lines = (
                json.dumps(
                    {
                        "name": name,
                        "role": self.role,
                        "start_ns": start_ns,
                        "end_ns": end_ns,
                        "sequence_id": sequence_id,
                        **fields,
                    }
                )
                for name, start_ns, end_ns, sequence_id, fields in self._records
            )
            try:
                _append(self._path, "\n".join(lines) + "\n")
            except OSError as error:
                if self.is_whole:
                    logger.warning("%s: cannot be written (%s)", self._path, error.strerror)
                self.is_whole = False
        self._records.clear()


class RunsRecorder(Recorder):
    """The recorder of a worker that serves several runs: each run's events go to a file of its own.

    No worker has to be told when a run begins: the sequence ids say which run an event belongs to. An event of no
    sequence goes where the event before it went.
    """

    def __init__(self, role: str, paths: Sequence[Path]) -> None:
        super().__init__(role)
        super().flush()  # the first event is in the recorders of the runs
        self._runs = [Recorder(role, path) for path in paths]
        self._number = 0

    def flush(self) -> None:
        """Append what was recorded to the files of its runs. A run without events keeps no file."""
        written = set()
        for name, start_ns, end_ns, sequence_id, fields in self._records:
            if sequence_id >= 0:
                self._number = sequence_id // SEQUENCES_PER_RUN
            written.add(self._number)
            self._runs[self._number].span(name, start_ns, end_ns, sequence_id, **fields)
        for number in sorted(written):
            self._runs[number].flush()
            self.is_whole = self._runs[number].is_whole
        super().flush()


@functools.cache
def _host_identity() -> str:
    """A digest that two processes share exactly when they share a monotonic clock: of the kernel's boot id on Linux.

    Containers of one machine share both. Elsewhere it is a digest of the host's name. It does not name the host.
    """
    try:
        name = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        name = platform.node()
    return hashlib.sha256(name.encode()).hexdigest()[:16]


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
