"""The fate of each drafted token, from the events of both workers."""

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
    """The token was right, but the target chose it itself before the candidate could be judged."""
    WASTED = "wasted"
    """Rolled back, or never needed."""


@dataclass(frozen=True, slots=True)
class Step:
    """One draft step and the fate of each token that it proposed."""

    event: DraftStep
    fates: tuple[Fate, ...]

    def count(self, fate: Fate) -> int:
        """How many of its tokens ended so."""
        return self.fates.count(fate)


def accepted_positions(target: Sequence[Event]) -> set[int]:
    """Positions of one sequence that were filled by an accepted candidate."""
    positions: set[int] = set()
    for event in target:
        if isinstance(event, TargetPass):
            positions.update(range(event.start_length, event.start_length + event.num_accepted))
    return positions


def drafts_tree(draft: Sequence[Event]) -> bool:
    """Whether the draft prepared for several verdicts in this sequence."""
    return any(isinstance(event, DraftPrefill) and event.fan_out > 1 for event in draft)


def judge_steps(draft: Sequence[Event], target: Sequence[Event]) -> list[Step]:
    """The draft steps of one sequence, in order.

    A token that the draft still held when its position was committed is the one that was accepted there: a position is
    drafted anew only after a rollback, and what was rolled back had been contradicted.

    Of a tree, each verdict says which steps foresaw it. The last pass of an answer sends none, so what it accepted is
    not found.
    """
    accepted = accepted_positions(target)
    is_tree = drafts_tree(draft)
    fates: list[tuple[DraftStep, list[Fate]]] = []
    held: dict[int, tuple[int, int]] = {}
    """Position -> (step, token of that step), for tokens not thrown away."""
    length = base = 0
    for event in draft:
        if isinstance(event, DraftPrefill):
            length = base = event.num_tokens
        elif isinstance(event, DraftStep):
            fates.append((event, [Fate.WASTED] * event.num_tokens))
            if is_tree:
                continue
            length = event.length
            first = length - event.num_tokens
            held |= {first + index: (len(fates) - 1, index) for index in range(event.num_tokens)}
        elif isinstance(event, VerdictTaken) and event.kept_steps is not None:
            for position, step in enumerate(event.kept_steps, start=event.kept_length - len(event.kept_steps)):
                _confirm(fates, step, Fate.ACCEPTED if position in accepted else Fate.OVERTAKEN)
        elif isinstance(event, VerdictTaken):
            for position in range(length - event.num_discarded, length):
                held.pop(position, None)
            base = event.committed_length
            length = base if event.num_discarded else max(length, base)
    for position, (step, index) in held.items():
        if position in accepted:
            fates[step][1][index] = Fate.ACCEPTED
        elif position < base:
            fates[step][1][index] = Fate.OVERTAKEN
    return [Step(event, tuple(tokens)) for event, tokens in fates]


def _confirm(fates: list[tuple[DraftStep, list[Fate]]], step: int, fate: Fate) -> None:
    """Settle one of the tokens that `step` (from 1) of a tree guessed. What was looked up (0) came from no step."""
    if step and Fate.WASTED in (tokens := fates[step - 1][1]):
        tokens[tokens.index(Fate.WASTED)] = fate
