"""The invariants of docs/protocol.md, checked while the workers run."""

from __future__ import annotations

from faults.models import Ghost, hashes_of

from amusd.protocol import prefix_hash
from amusd.protocol.draft_session import DraftSession
from amusd.protocol.messages import Candidate
from amusd.protocol.target_session import TargetSession
from amusd.protocol.verification import Block

MAX_WAIT_NS = 2_000_000_000
"""Before a pass: no policy of the simulation, and no silence, has the target wait for longer."""
MAX_WAITS = 2_000
"""Before a pass: each is ended by a message, or by a deadline."""


class Violation(AssertionError):  # noqa: N818 - a finding, not an error of the simulation
    """An invariant does not hold."""


class Watch:
    """Over all answers of a run."""

    def __init__(self) -> None:
        self.ghosts: dict[Candidate, frozenset[Ghost]] = {}
        """What each message says, and what it was drafted from. The frame does not carry that."""
        self._drafted: set[Ghost] = set()
        self._drafts: dict[tuple[int, int], tuple[int, int]] = {}
        """(incarnation, sequence) -> epoch and base of the draft."""
        self._committed: dict[int, tuple[int, ...]] = {}
        """By sequence."""

    def begin(self, text: tuple[int, ...], max_length: int) -> None:
        """Another answer; `text` is what the target writes alone."""
        self._text = text
        self._hashes = hashes_of(text)
        self._max_length = max_length
        self.attached()

    def attached(self) -> None:
        """Another life of the draft works on it: nothing of an earlier one counts."""
        self._drafted = set()
        self._epoch = 0

    def received(self, message: Candidate) -> None:
        """By the session that it is for."""
        self._drafted |= self.ghosts.get(message, frozenset())

    def committed(self, session: TargetSession) -> None:
        """I1, I2, I3, I5."""
        committed = session.committed
        if len(committed) < len(self._committed.get(session.sequence_id, ())):
            raise Violation("I1: the committed prefix shrank")
        self._committed[session.sequence_id] = committed
        if len(committed) > self._max_length:
            raise Violation("I5: the text is too long")
        if committed != self._text[: len(committed)]:
            raise Violation("I2: a committed token is not the target's")
        if session.epoch < self._epoch:
            raise Violation("I3: the target's epoch went back")
        self._epoch = session.epoch

    def evaluated(self, session: TargetSession, candidates: tuple[int, ...]) -> None:
        """I6."""
        prefix = self._hashes[session.committed_length]
        for offset, token_id in enumerate(candidates):
            if (prefix, token_id) not in self._drafted:
                position = session.committed_length + offset
                raise Violation(f"I6: candidate {token_id} at {position} was not drafted from what stands before it")
            prefix = prefix_hash.extend(prefix, token_id)

    def scored(self, session: TargetSession, block: Block) -> None:
        """I6, of all that is in a pass."""
        prefixes = [self._hashes[session.committed_length]]
        for token_id, parent in zip(block.token_ids[1:], block.parents, strict=True):
            if (prefixes[parent], token_id) not in self._drafted:
                raise Violation(f"I6: candidate {token_id} was not drafted from the row before it")
            prefixes.append(prefix_hash.extend(prefixes[parent], token_id))

    def waited(self, ns: int, number: int) -> None:
        """L1. `number`: of waits, which may have taken no time at all."""
        if ns > MAX_WAIT_NS or number > MAX_WAITS:
            raise Violation(f"L1: the target has waited for {ns / 1e9:.3f} seconds, {number} times")

    def draft_stepped(self, incarnation: int, session: DraftSession) -> None:
        """I3, I4, R1."""
        epoch_before, base_before = self._drafts.get((incarnation, session.sequence_id), (0, 0))
        if session.epoch < epoch_before:
            raise Violation("I3: the draft's epoch went back")
        if session.base < base_before:
            raise Violation("I4: the draft's base went back")
        self._drafts[incarnation, session.sequence_id] = session.epoch, session.base
        end = 1 + max((node.position for node in session.root.below()), default=0)
        if end > min(session.base + session._max_lookahead, session._max_length):
            raise Violation("R1: the draft runs too far ahead")
        if self._committed[session.sequence_id][: session.base] != session.committed:
            raise Violation("I4: the draft's base is not a committed prefix")
