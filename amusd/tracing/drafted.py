"""What became of each drafted token, from the events of both workers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from amusd.tracing.recorder import Event


class Fate(enum.Enum):
    """How a drafted token ended."""

    ACCEPTED = "accepted"
    """The target accepted it as a candidate."""
    OVERTAKEN = "overtaken"
    """It was right, but the target chose the same token itself before the candidate could be judged."""
    WASTED = "wasted"
    """Rolled back, or never needed."""


@dataclass(frozen=True, slots=True)
class Step:
    """One draft step and the fate of each token that it proposed."""

    event: Event
    fates: tuple[Fate, ...]

    def count(self, fate: Fate) -> int:
        """How many of its tokens ended so."""
        return self.fates.count(fate)


def accepted_positions(target: Sequence[Event]) -> set[int]:
    """Positions of one sequence that were filled by an accepted candidate."""
    positions: set[int] = set()
    for event in target:
        if event.name == "target_pass":
            start = event.fields["committed_length"] - event.fields["num_tokens"]
            positions.update(range(start, start + event.fields["num_accepted"]))
    return positions


def drafts_tree(draft: Sequence[Event]) -> bool:
    """Whether the draft prepared for several verdicts in this sequence."""
    return any(event.name == "draft_prefill" and event.fields.get("fan_out", 1) > 1 for event in draft)


def judge_steps(draft: Sequence[Event], target: Sequence[Event]) -> list[Step]:
    """The draft steps of one sequence, in order.

    A token that the draft still held when its position was committed is the one that was accepted there: a position is
    drafted anew only after a rollback, and what was rolled back had been contradicted.

    Of a tree, each verdict says which steps foresaw it. The last pass of an answer sends none, so what it accepted is
    not found.
    """
    accepted = accepted_positions(target)
    is_tree = drafts_tree(draft)
    fates: list[tuple[Event, list[Fate]]] = []
    held: dict[int, tuple[int, int]] = {}
    """Position -> (step, token of that step), for tokens not thrown away."""
    length = base = 0
    for event in draft:
        fields = event.fields
        if event.name == "draft_prefill":
            length = base = fields["num_tokens"]
        elif event.name == "draft_step":
            fates.append((event, [Fate.WASTED] * fields["num_tokens"]))
            if is_tree:
                continue
            length = fields["length"]
            first = length - fields["num_tokens"]
            held |= {first + index: (len(fates) - 1, index) for index in range(fields["num_tokens"])}
        elif "kept_steps" in fields:
            first = fields["committed_length"] - fields["num_adopted"] - len(fields["kept_steps"])
            for position, step in enumerate(fields["kept_steps"], start=first):
                _confirm(fates, step, Fate.ACCEPTED if position in accepted else Fate.OVERTAKEN)
        elif event.name in ("advance", "rollback"):
            for position in range(length - fields["num_discarded"], length):
                held.pop(position, None)
            base = fields["committed_length"]
            length = base if fields["num_discarded"] else max(length, base)
    for position, (step, index) in held.items():
        if position in accepted:
            fates[step][1][index] = Fate.ACCEPTED
        elif position < base:
            fates[step][1][index] = Fate.OVERTAKEN
    return [Step(event, tuple(tokens)) for event, tokens in fates]


def _confirm(fates: list[tuple[Event, list[Fate]]], step: int, fate: Fate) -> None:
    """Of a tree: one of the tokens that `step` (from 1) guessed. What was looked up (0) came from no step."""
    if step and Fate.WASTED in (tokens := fates[step - 1][1]):
        tokens[tokens.index(Fate.WASTED)] = fate
