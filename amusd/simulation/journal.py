"""Events of a simulated worker: the names and fields of the real ones, at virtual times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from amusd.protocol.messages import Message
from amusd.simulation.clock import VirtualClock
from amusd.tracing.events import NO_SEQUENCE
from amusd.tracing.messages import record_message
from amusd.tracing.recorder import Recorder
from amusd.types import Role


class Journal(Recorder):
    """The recorder of one simulated worker: on the virtual clock, and forgetful where nobody wants the events."""

    def __init__(self, role: Role, clock: VirtualClock, *, keep: bool, path: Path | None = None) -> None:
        self._clock = clock
        self._keep = False  # what the recorder itself says of this process is not part of a simulation
        super().__init__(role.value, path)
        self._keep = keep
        self.instant("worker", NO_SEQUENCE, host="simulated", pid=0)

    def span(self, name: str, start_ns: int, end_ns: int, sequence_id: int, **fields: Any) -> None:
        """Record something that took time."""
        if self._keep:
            super().span(name, start_ns, end_ns, sequence_id, **fields)

    def instant(self, name: str, sequence_id: int, **fields: Any) -> None:
        """Record something that happened now."""
        self.span(name, self._clock.now_ns, self._clock.now_ns, sequence_id, **fields)

    def message(self, name: str, message: Message, **received: Any) -> None:
        """Record that a message is sent, or has been received and what became of it."""
        if self._keep:
            record_message(self, name, message, **received)
