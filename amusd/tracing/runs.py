"""The events of a worker that serves several runs, each run's in a file of its own.

No worker has to be told when a run begins: the sequence ids say which run an event belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from amusd.tracing.recorder import Recorder

SEQUENCES_PER_RUN = 1 << 32
"""Run `i` has the sequence ids from `i * SEQUENCES_PER_RUN` on."""


class RunsRecorder(Recorder):
    """Sorts events by run when they are flushed. What belongs to no sequence goes where the event before it went."""

    def __init__(self, role: str, paths: Sequence[Path]) -> None:
        super().__init__(role)
        super().flush()  # what a recorder begins with is in those of the runs
        self._runs = [Recorder(role, path) for path in paths]
        self._number = 0

    def flush(self) -> None:
        """Append what was recorded to the files of its runs. A run without events keeps no file."""
        written = set()
        for event in self.events:
            if event.sequence_id >= 0:
                self._number = event.sequence_id // SEQUENCES_PER_RUN
            written.add(self._number)
            self._runs[self._number].span(event.name, event.start_ns, event.end_ns, event.sequence_id, **event.fields)
        for number in sorted(written):
            self._runs[number].flush()
            self.is_whole = self._runs[number].is_whole
        super().flush()
