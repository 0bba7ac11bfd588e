"""The fate of each drafted token, from both workers' events."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from amusd.tracing.events import DraftPrefill, DraftStep, Event, TargetPass, VerdictTaken


class Fate(enum.Enum):
    """How a drafted token ended."""

    ACCEPTED = "accepted"
    """The target accepted it as a candidate."""
    OVERTAKEN = "overtaken"
    """Right, but the target chose it before the candidate could be judged."""
    WASTED = "wasted"


@dataclass(frozen=True, slots=True)
class Step:
    """One draft step and the fate of each token that it proposed."""

    event: DraftStep
    fates: tuple[Fate, ...]

    def count(self, fate: Fate) -> int:
        """How many of its tokens ended so."""
        return self.fates.count(fate)


def drafts_tree(draft: Sequence[Event]) -> bool:
    """Whether the draft prepared for several verdicts in this sequence."""
    return any(isinstance(event, DraftPrefill) and event.fan_out > 1 for event in draft)


def judge_steps(draft: Sequence[Event], target: Sequence[Event]) -> list[Step]:
    """The draft steps of one sequence, in order.

    A token that the draft still held when its position was committed was accepted there. Of a tree, each verdict says
    which steps foresaw it. The last pass of an answer sends none, so what it accepted is not found.
    """
    passes = [event for event in target if isinstance(event, TargetPass)]
    accepted = {each.start_length + place for each in passes for place in range(each.num_accepted)}
    fates: list[tuple[DraftStep, list[Fate]]] = []
    held: dict[int, tuple[int, int]] = {}
    """Position -> (step, token of that step), for tokens of a chain that were kept."""
    is_tree = drafts_tree(draft)
    length = base = num_before = 0  # the last one: steps of earlier lives of the draft
    for event in draft:
        if isinstance(event, DraftPrefill):
            length = base = event.num_tokens
            num_before = len(fates)
            held = {position: place for position, place in held.items() if position < base}
        elif isinstance(event, DraftStep):
            fates.append((event, [Fate.WASTED] * event.num_tokens))
            if not is_tree:
                length, first = event.length, event.length - event.num_tokens
                held |= {first + index: (len(fates) - 1, index) for index in range(event.num_tokens)}
        elif isinstance(event, VerdictTaken) and event.kept_steps is not None:
            for position, step in enumerate(event.kept_steps, start=event.kept_length - len(event.kept_steps)):
                _confirm(fates[num_before:], step, Fate.ACCEPTED if position in accepted else Fate.OVERTAKEN)
        elif isinstance(event, VerdictTaken):
            for position in range(length - event.num_discarded, length):
                held.pop(position, None)
            base = event.committed_length
            length = base if event.num_discarded else max(length, base)
    for position, (step, index) in held.items():
        if position in accepted or position < base:
            fates[step][1][index] = Fate.ACCEPTED if position in accepted else Fate.OVERTAKEN
    return [Step(event, tuple(tokens)) for event, tokens in fates]


def _confirm(fates: list[tuple[DraftStep, list[Fate]]], step: int, fate: Fate) -> None:
    if step and Fate.WASTED in (tokens := fates[step - 1][1]):
        tokens[tokens.index(Fate.WASTED)] = fate
