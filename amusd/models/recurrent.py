"""States of recurrent layers, which cannot be cut back: they are kept at a few lengths of a sequence.

    0 ............ state ............ length
                     [ fed once more ) [ rows of the next pass )

A pass leaves a state behind its final rows, which no rollback drops, and one behind its last row, which counts if all
are kept. After a rollback the next pass begins at the newest state that is left.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

State: TypeAlias = dict[int, Any]
"""By number of layer: transformers' cache layer, whose tensors passes change in place."""
_MOST_UNKEPT = 16
"""Tokens that a draft may run ahead of the newest state that is kept."""


@dataclass(eq=False)
class StatePart:
    """One sequence's rows in a pass, from `first` on: the final ones, then others."""

    history: StateHistory
    first: int
    token_ids: Sequence[int]
    num_final: int
    """Leading rows that no rollback drops. If negative, the last `-num_final` tokens before them may be dropped too."""
    state: State = field(default_factory=dict)
    """Before the pass; afterwards behind its last row."""
    final: State = field(default_factory=dict)
    """Behind the final rows, where others follow."""

    def pieces(self, layer: int, most: int | None) -> Iterator[slice]:
        """The rows of each call of a layer, whose state behind the final ones is kept when the next are asked for.

        `most`: rows of a call; None: any number.
        """
        border, end = self.first + max(0, self.num_final), self.first + len(self.token_ids)
        for start, stop in ((self.first, border), (border, end)):
            for row in range(start, stop, most or max(1, stop - start)):
                yield slice(row, min(stop, row + (most or stop)))
            if start < stop < end:
                self.final[layer] = copied(self.state[layer])


class StateHistory:
    """A sequence's tokens and the states at some of its lengths."""

    def __init__(self, shelf: list[tuple[StateHistory, int]], most_bytes: int) -> None:
        """`shelf`: where states are kept for other prompts, of all sequences, the oldest first: up to `most_bytes`."""
        self.token_ids: list[int] = []
        self.states: dict[int, State] = {}
        self._shelf, self._most_bytes = shelf, most_bytes

    def newest(self, length: int) -> int:
        """The greatest length up to `length` at which there is a state."""
        return max((place for place in self.states if place <= length), default=0)

    @property
    def state_bytes(self) -> int:
        """Bytes of a state; 0 before the first pass."""
        layers = next(iter(self.states.values()), {}).values()
        parts = [parts for layer in layers for parts in vars(layer).values() if isinstance(parts, dict)]
        return sum(part.nbytes for each in parts for part in each.values() if isinstance(part, Tensor))

    def truncate(self, length: int) -> None:
        """Forget what lies beyond `length`."""
        del self.token_ids[length:]
        self.states = {place: state for place, state in self.states.items() if place <= length}
        self._shelf[:] = [entry for entry in self._shelf if entry[0] is not self or entry[1] <= length]

    def begin(self, first: int, token_ids: Sequence[int], num_final: int) -> StatePart:
        """A pass of these tokens behind the newest state."""
        start = len(self.token_ids)
        state = self.states.pop(start, {})
        is_far = num_final < 0 and start - self.newest(start) >= _MOST_UNKEPT
        if num_final == 0 or is_far or (self, start) in self._shelf:
            self.states[start] = {number: copied(layer) for number, layer in state.items()}
        return StatePart(self, first, token_ids, num_final, state)

    def end(self, part: StatePart) -> None:
        """Take in the tokens of a pass and its states; those that no rollback needs are dropped."""
        final = len(self.token_ids) + part.num_final
        self.token_ids += part.token_ids
        self.states[len(self.token_ids)] = part.state
        if part.final:
            self.states[final] = part.final
        needed = {self.newest(final), *(place for history, place in self._shelf if history is self)}
        self.states = {place: state for place, state in self.states.items() if place >= final or place in needed}

    def keep(self) -> None:
        """Keep the newest state for prompts that begin alike; the oldest ones give way."""
        place = len(self.token_ids)
        if place in self.states and (self, place) not in self._shelf:
            self._shelf.append((self, place))
            most = self._most_bytes // max(1, self.state_bytes)
            while len(self._shelf) > most:
                history, oldest = self._shelf.pop(0)
                if oldest < len(history.token_ids):  # else the sequence goes on from it
                    history.states.pop(oldest, None)


def copied(layer: Any) -> Any:
    """A copy of a cache layer, whose tensors are its own."""
    twin = copy.copy(layer)
    for name, parts in vars(layer).items():
        if isinstance(parts, dict):
            vars(twin)[name] = {key: part.clone() if isinstance(part, Tensor) else part for key, part in parts.items()}
    return twin
