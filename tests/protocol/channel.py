"""One way between two sessions that a harness drives: in order, with losses, and with copies that come at any time."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Sent = TypeVar("Sent")


@dataclass
class Channel(Generic[Sent]):
    """What is on its way. A message out of order is one that was lost, and whose copy comes later."""

    random: random.Random
    _queue: deque[Sent] = field(default_factory=deque)
    _copies: list[Sent] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self._queue)

    @property
    def on_its_way(self) -> tuple[Sent, ...]:
        """All that may still arrive, copies among it."""
        return (*self._queue, *self._copies)

    def send(self, sent: Sent, *, lose: float, duplicate: float) -> None:
        """With these probabilities it is lost, and there is a copy of it."""
        if self.random.random() >= lose:
            self._queue.append(sent)
        if self.random.random() < duplicate:
            self._copies.append(sent)

    def next(self) -> Sent | None:
        """What was sent first of what is on its way."""
        return self._queue.popleft() if self._queue else None

    def any_copy(self) -> Sent | None:
        """Of whatever was sent so far, also to a life that is over."""
        return self._copies.pop(self.random.randrange(len(self._copies))) if self._copies else None

    def clear(self) -> None:
        """The receiver is gone: what was on its way to it is lost. Copies are not."""
        self._queue.clear()
