"""A run's events read back: both workers, the messages between them, and the fate of each drafted token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from msgspec import convert, json

from amusd.tracing.events import EVENT_CLASSES, DraftPrefill, DraftStep, Event, MessageEvent, TargetPass, VerdictTaken

Fate: TypeAlias = Literal["accepted", "overtaken", "wasted"]
"""How a drafted token ended. `overtaken`: right, but the target chose it before the candidate could be judged."""

Step: TypeAlias = tuple[DraftStep, dict[Fate, int]]
"""A draft step, and the number of its tokens by fate."""

Flow: TypeAlias = tuple[MessageEvent, MessageEvent]
"""One message: the events of its sending and of its receiving."""

_description = attrgetter("sequence_id", "message", "num_tokens", "first", "base", "start", "epoch")


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

    @property
    def passes(self) -> list[TargetPass]:
        """The target's passes."""
        return [event for event in self.target if isinstance(event, TargetPass)]

    @property
    def has_tree(self) -> bool:
        """Whether the draft of this one sequence made a tree."""
        return any(isinstance(event, DraftPrefill) and event.fan_out > 1 for event in self.draft)

    def by_sequence(self) -> dict[int, Timeline]:
        """The part of each sequence."""
        found: dict[int, Timeline] = defaultdict(lambda: Timeline([], []))
        for place, events in enumerate(self):
            for event in events:
                found[event.sequence_id][place].append(event)
        return found

    def steps(self) -> list[Step]:
        """The draft steps of one sequence, in order.

        A chain's token is right if the draft still held it when its position was committed. For a tree, each verdict
        names the steps of its tokens; an answer's last pass sends no verdict, so its tokens count as wasted.
        """
        accepted = {each.start_length + place for each in self.passes for place in range(each.num_accepted)}
        steps: list[Step] = []
        held: dict[int, Step] = {}
        """Position -> its step, for tokens of a chain that were kept."""
        right: list[tuple[int, Step]] = []
        """Position and step of each right token."""
        is_tree = self.has_tree
        length = base = num_before = 0  # num_before: steps of earlier incarnations
        for event in self.draft:
            if isinstance(event, DraftPrefill):
                length = base = event.num_tokens
                num_before = len(steps)
                held = {position: step for position, step in held.items() if position < base}
            elif isinstance(event, DraftStep):
                steps.append((event, {"accepted": 0, "overtaken": 0, "wasted": event.num_tokens}))
                if not is_tree:
                    length = event.length
                    held |= dict.fromkeys(range(length - event.num_tokens, length), steps[-1])
            elif isinstance(event, VerdictTaken) and event.kept_steps is not None:
                numbered = enumerate(event.kept_steps, start=event.kept_length - len(event.kept_steps))
                right += [(position, steps[num_before + number - 1]) for position, number in numbered if number]
            elif isinstance(event, VerdictTaken):
                for position in range(length - event.num_discarded, length):
                    held.pop(position, None)
                base = event.committed_length
                length = base if event.num_discarded else max(length, base)
        right += [(position, step) for position, step in held.items() if position in accepted or position < base]
        for position, (_, fates) in right:
            fates["wasted"] -= 1
            fates["accepted" if position in accepted else "overtaken"] += 1
        return steps


def match_messages(sender: Sequence[Event], receiver: Sequence[Event]) -> list[Flow]:
    """The messages of one direction that both sides recorded, in order.

    A link keeps the order and loses whole messages only, so a received message is the next equal one that was sent.
    """
    flows: list[Flow] = []
    sent = [event for event in sender if isinstance(event, MessageEvent) and event.name == "send"]
    descriptions = [_description(event) for event in sent]
    place = -1
    for received in receiver:
        if isinstance(received, MessageEvent) and received.name == "receive":
            with suppress(ValueError):  # its sender did not record it
                place = descriptions.index(_description(received), place + 1)
                flows.append((sent[place], received))
    return flows


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
