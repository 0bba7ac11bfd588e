"""A run's events read back: those of both workers, and the messages between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import json

from amusd.tracing.events import AnyEvent, Event
from amusd.tracing.messages import Flow, match_messages


@dataclass(frozen=True, slots=True)
class Timeline:
    """The events of both workers; the draft's may be empty."""

    target: tuple[Event, ...]
    draft: tuple[Event, ...]
    to_draft: tuple[Flow, ...]
    to_target: tuple[Flow, ...]

    @classmethod
    def of(cls, target: Sequence[Event], draft: Sequence[Event]) -> Timeline:
        """A timeline of recorded events."""
        to_draft, to_target = match_messages(target, draft), match_messages(draft, target)
        return cls(tuple(target), tuple(draft), tuple(to_draft), tuple(to_target))

    def only(self, sequence_id: int) -> Timeline:
        """The part of one sequence."""
        return Timeline(
            target=tuple(event for event in self.target if event.sequence_id == sequence_id),
            draft=tuple(event for event in self.draft if event.sequence_id == sequence_id),
            to_draft=tuple(flow for flow in self.to_draft if flow.sent.sequence_id == sequence_id),
            to_target=tuple(flow for flow in self.to_target if flow.sent.sequence_id == sequence_id),
        )


def read_timeline(run_directory: Path) -> Timeline:
    """The timeline of a run; empty without events."""
    return Timeline.of(read_events(run_directory, "target"), read_events(run_directory, "draft"))


def read_events(run_directory: Path, role: str) -> list[Event]:
    """The events of one worker in order; empty without any.

    Raises `ValueError` for malformed lines.
    """
    path = run_directory / "events" / f"{role}.jsonl"
    if not path.is_file():
        return []
    found: list[Event] = json.Decoder(AnyEvent).decode_lines(path.read_bytes())
    return found


def by_sequence(events: Sequence[Event]) -> dict[int, list[Event]]:
    """The events of each sequence, in order."""
    found: dict[int, list[Event]] = {}
    for event in events:
        found.setdefault(event.sequence_id, []).append(event)
    return found
