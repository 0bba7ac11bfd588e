"""The fate of each drafted token, from both workers' events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from amusd.tracing.events import DraftPrefill, DraftStep, Event, TargetPass, VerdictTaken

Fate: TypeAlias = Literal["accepted", "overtaken", "wasted"]
"""How a drafted token ended. `overtaken`: right, but the target chose it before the candidate could be judged."""

Step: TypeAlias = tuple[DraftStep, dict[Fate, int]]
"""A draft step, and the number of its tokens by fate."""


def drafts_tree(draft: Sequence[Event]) -> bool:
    """Whether the draft prepared for several verdicts in this sequence."""
    return any(isinstance(event, DraftPrefill) and event.fan_out > 1 for event in draft)


def judge_steps(target: Sequence[Event], draft: Sequence[Event]) -> list[Step]:
    """The draft steps of one sequence, in order.

    A token that the draft still held when its position was committed was accepted there. Each verdict on
    a tree says which steps foresaw it. The last pass of an answer sends none, so what it accepted is not found.
    """
    passes = [event for event in target if isinstance(event, TargetPass)]
    accepted = {each.start_length + place for each in passes for place in range(each.num_accepted)}
    steps: list[Step] = []
    held: dict[int, Step] = {}
    """Position -> its step, for tokens of a chain that were kept."""
    right: list[tuple[int, Step]] = []
    """Position and step of each right token."""
    is_tree = drafts_tree(draft)
    length = base = num_before = 0  # the last one: steps of earlier draft processes
    for event in draft:
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
