"""The rollback manager rolls back a draft's tree and its drafter's cache together, or neither.

    session           [0, base) committed, and a tree after it
    drafter           the same committed tokens, and keys and values of computed nodes

The session takes in a verdict, then the drafter follows. If the drafter fails, the tree is dropped, and the drafter is
opened again with the committed tokens. If that fails too, the draft ends.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from amusd.config import Distribution
from amusd.drafters.base import Drafter
from amusd.errors import ConfigError, PeerProtocolError
from amusd.logs import logger, warn_once
from amusd.protocol.draft_session import DraftSession
from amusd.protocol.draft_tree import Transition
from amusd.protocol.messages import Features, Open, Verdict


class RollbackManager:
    """One sequence's session and drafter, which agree once the manager is open."""

    def __init__(self, opening: Open, drafter: Drafter) -> None:
        """Raises `PeerProtocolError` for an impossible `opening`."""
        try:
            self.distribution = Distribution.of(opening.sampling)
        except ConfigError as error:
            raise PeerProtocolError(str(error)) from None
        self.session = DraftSession(opening, draft_length=drafter.max_length, needs_parent=drafter.needs_parent)
        self.drafter = drafter
        self.num_looked_up = 0
        self.features: list[Features] = []
        """Features that have arrived but were not taken in."""
        self._taken: list[tuple[int, Tensor]] = []
        self._capacity = min(opening.max_length, drafter.max_length or opening.max_length)

    def open(self) -> None:
        """Give the drafter the committed text and its features."""
        opening = self.session.opening
        self.drafter.set_reference((*opening.token_ids, *opening.reference))
        self.drafter.set_distribution(self.distribution)
        if self._has_room():
            self.drafter.open(self.session.committed, self._capacity, opening.fan_out)
            for start, features in self._taken:
                self.drafter.take_features(start, features)
            self._catch_up()

    @property
    def has_work(self) -> bool:
        """Whether anything is worth computing before the next verdict."""
        return self.session.tree.has_work and self.drafter.is_ready

    @property
    def can_wait(self) -> bool:
        """Whether the next step may wait for a verdict: in a tree whose root has children."""
        return bool(self.session.tree.root.children) and not self.session.tree.is_chain

    @property
    def length(self) -> int:
        """Committed tokens and nodes."""
        return self.session.base + self.session.tree.num_nodes

    def apply(self, verdict: Verdict) -> Transition | None:
        """Bring session and drafter in line with `verdict`; None if it was stale.

        Raises `PeerProtocolError` for an impossible verdict, which changes nothing, and `AssertionError` when the
        drafter could neither follow nor be opened again.
        """
        transition = self.session.receive(verdict)
        if transition is None or not self._has_room():
            return transition
        try:
            self.drafter.follow(transition)
            self._catch_up()
        except Exception as error:  # noqa: BLE001 - opening again may mend any failure
            logger.warning("the drafter could not follow a verdict, and is opened again: %r", error)
            logger.debug("the drafter failed here", exc_info=True)
            transition = replace(transition, num_discarded=transition.num_discarded + self.session.tree.drop())
            self._reopen()
        return transition

    def take_features(self) -> None:
        """Give the drafter the features of committed tokens. Invalid features are dropped."""
        due = [message for message in self.features if message.end <= self.session.base]
        self.features = [message for message in self.features if message.end > self.session.base]
        for message in due if due and self._has_room() else ():
            with suppress(ValueError):
                features = _unpack(message)
                self.drafter.take_features(message.start, features)
                self._taken.append((message.start, features))

    def close(self) -> None:
        """Release the drafter."""
        self.drafter.close()

    def _has_room(self) -> bool:
        if self.session.base > self._capacity:
            warn_once(f"draft: its model takes {self._capacity} tokens; after them the target goes on alone")
        return self.session.base <= self._capacity

    def _reopen(self) -> None:
        try:
            self.open()
        except Exception as error:
            raise AssertionError(f"the drafter could not be opened again: {error}") from error

    def _catch_up(self) -> None:
        """Check that the drafter has the committed tokens, and add looked-up tokens to the tree."""
        if self.drafter.length != self.session.base:
            raise AssertionError(f"drafter holds {self.drafter.length} tokens, session {self.session.base}")
        if self.distribution.rule != "rejection":  # rejection needs each token's distribution
            self.num_looked_up += self.session.tree.guess_path(*self.drafter.look_up())


def _unpack(message: Features) -> Tensor:
    """The rows of a message, bfloat16 [rows, width]. Raises `ValueError` for impossible ones."""
    number = message.end - message.start
    if number < 1 or not message.rows or len(message.rows) % (2 * number):
        raise ValueError(f"{len(message.rows)} bytes are no features of {number} tokens")
    rows = torch.frombuffer(bytearray(message.rows), dtype=torch.bfloat16).view(number, -1)
    if not rows.isfinite().all():
        raise ValueError("features are not finite")
    return rows
