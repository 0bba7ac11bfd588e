"""A run's events read back: those of both workers, and the messages between them."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import convert, json

from amusd.tracing.events import EVENT_CLASSES, Event
from amusd.tracing.messages import Flow, match_messages


class Timeline(NamedTuple):
    """The events of both workers; the draft's may be empty."""

    target: list[Event]
    draft: list[Event]

    @property
    def to_draft(self) -> list[Flow]:
        """The messages that the draft received."""
        return match_messages(self.target, self.draft)

    @property
    def to_target(self) -> list[Flow]:
        """The messages that the target received."""
        return match_messages(self.draft, self.target)

    def by_sequence(self) -> dict[int, Timeline]:
        """The part of each sequence."""
        found: dict[int, tuple[list[Event], list[Event]]] = defaultdict(lambda: ([], []))
        for place, events in enumerate(self):
            for event in events:
                found[event.sequence_id][place].append(event)
        return {sequence_id: Timeline(*part) for sequence_id, part in found.items()}


def read_timeline(run_directory: Path) -> Timeline:
    """The timeline of a run; empty without events."""
    return Timeline(*(read_events(run_directory, role) for role in ("target", "draft")))


def read_events(run_directory: Path, role: str) -> list[Event]:
    """The events of one worker in order; empty without any.

    Raises `ValueError` for malformed lines.
    """
    path = run_directory / "events" / f"{role}.jsonl"
    if not path.is_file():
        return []
    lines = json.Decoder(dict[str, Any]).decode_lines(path.read_bytes())
    return [convert(line, EVENT_CLASSES.get(str(line.get("name")), Event)) for line in lines]
