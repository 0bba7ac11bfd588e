"""States of recurrent layers. A state cannot be truncated, so states are kept at a few lengths of a sequence.

    0 ............ state ............ length
                     [ fed once more ) [ rows of the next pass )

A pass leaves a state after its final rows, which no rollback drops, and after its last row. After a rollback the next
pass begins at the newest state left.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakSet

from torch import Tensor

State: TypeAlias = dict[int, Any]
"""Layer number -> transformers' cache layer, whose tensors passes change in place."""
_MOST_UNKEPT = 16
"""Tokens that a draft may run ahead of the newest state that is kept."""


@dataclass(eq=False)
class StatePart:
    """One sequence's rows in a pass, from `first` on: final rows, then others."""

    history: StateHistory
    first: int
    token_ids: Sequence[int]
    num_final: int
    """See `Rows`."""
    state: State = field(default_factory=dict)
    """State before the pass, then after its last row."""
    final: State = field(default_factory=dict)
    """State after the final rows; empty if all rows or none are final."""

    def pieces(self, layer: int, most: int | None) -> Iterator[slice]:
        """Yield the rows of each call of a layer, and keep the layer's state after the final rows.

        `most`: rows of a call; None: any number.
        """
        border, end = self.first + max(0, self.num_final), self.first + len(self.token_ids)
        for start, stop in ((self.first, border), (border, end)):
            step = most or max(1, stop - start)
            for row in range(start, stop, step):
                yield slice(row, min(stop, row + step))
            if start < stop < end:
                self.final[layer] = copied(self.state[layer])


class StateHistory:
    """A sequence's tokens and the states at some of its lengths."""

    def __init__(self, shelf: StateShelf) -> None:
        self.token_ids: list[int] = []
        self.states: dict[int, State] = {}
        self.kept: dict[int, int] = {}
        """Lengths whose states are kept for other prompts, each with its number on the shelf."""
        self._shelf = shelf

    def newest(self, length: int) -> int:
        """The greatest length up to `length` that has a state; 0: none."""
        return max((place for place in self.states if place <= length), default=0)

    @property
    def state_bytes(self) -> int:
        """Bytes of a state; 0 before the first pass."""
        layers = next(iter(self.states.values()), {}).values()
        parts = [parts for layer in layers for parts in vars(layer).values() if isinstance(parts, dict)]
        return sum(part.nbytes for each in parts for part in each.values() if isinstance(part, Tensor))

    def truncate(self, length: int) -> None:
        """Drop tokens and states beyond `length`."""
        del self.token_ids[length:]
        self.states = {place: state for place, state in self.states.items() if place <= length}
        self.kept = {place: number for place, number in self.kept.items() if place <= length}

    def begin(self, first: int, token_ids: Sequence[int], num_final: int) -> StatePart:
        """Begin a pass of these tokens at the newest state."""
        start = len(self.token_ids)
        state = self.states.pop(start, {})
        is_far = num_final < 0 and start - self.newest(start) >= _MOST_UNKEPT
        if num_final == 0 or is_far or start in self.kept:
            self.states[start] = {number: copied(layer) for number, layer in state.items()}
        return StatePart(self, first, token_ids, num_final, state)

    def end(self, part: StatePart) -> None:
        """Add a pass's tokens and states; drop states that no rollback or prompt needs."""
        final = len(self.token_ids) + part.num_final
        self.token_ids += part.token_ids
        self.states[len(self.token_ids)] = part.state
        if part.final:
            self.states[final] = part.final
        needed = {self.newest(final), *self.kept}
        self.states = {place: state for place, state in self.states.items() if place >= final or place in needed}

    def store(self) -> None:
        """Keep the newest state for prompts that begin alike."""
        place = len(self.token_ids)
        if place in self.states and place not in self.kept:
            self._shelf.add(self, place)


class StateShelf:
    """Keeps the newest states of all sequences for other prompts."""

    def __init__(self, most_bytes: int = 0) -> None:
        self._most_bytes = most_bytes
        self._histories: WeakSet[StateHistory] = WeakSet()
        self._numbers = itertools.count()

    def add(self, history: StateHistory, place: int) -> None:
        """Keep the state of `history` at length `place`; drop the oldest beyond the limit."""
        history.kept[place] = next(self._numbers)
        self._histories.add(history)
        kept = sorted((number, place, each) for each in self._histories for place, number in each.kept.items())
        most = self._most_bytes // max(1, history.state_bytes)
        for _, oldest, each in kept[: max(0, len(kept) - most)]:
            del each.kept[oldest]
            if oldest < len(each.token_ids):  # else the sequence needs this state
                each.states.pop(oldest, None)


def copied(layer: Any) -> Any:
    """A copy of a cache layer with tensors of its own."""
    twin = copy.copy(layer)
    for name, parts in vars(layer).items():
        if isinstance(parts, dict):
            vars(twin)[name] = {key: part.clone() if isinstance(part, Tensor) else part for key, part in parts.items()}
    return twin
