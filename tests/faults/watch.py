"""The invariants of docs/protocol.md, checked while the workers run."""

from __future__ import annotations

from dataclasses import dataclass, field

from faults.models import Ghost, hashes_of, text_of

from amusd.protocol import prefix_hash
from amusd.protocol.draft_session import DraftSession
from amusd.protocol.messages import Candidate
from amusd.protocol.target_session import TargetSession
from amusd.protocol.verification import Block

MAX_WAIT_NS = 2_000_000_000
"""Longest wait before a pass: no policy of the simulation and no silence asks for more."""
MAX_WAITS = 2_000


class Violation(AssertionError):  # noqa: N818 - a finding, not an error of the simulation
    """An invariant does not hold."""


@dataclass
class Watched:
    text: tuple[int, ...]
    max_length: int
    hashes: list[int] = field(default_factory=list)
    committed: tuple[int, ...] = ()
    epoch: int = 0
    drafted: set[Ghost] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.hashes = hashes_of(self.text)


class Watch:
    def __init__(self) -> None:
        self.ghosts: dict[Candidate, frozenset[Ghost]] = {}
        """The ghosts of each message's tokens, which its frame does not carry."""
        self._drafts: dict[tuple[int, int], tuple[int, int]] = {}
        self._answers: dict[int, Watched] = {}
        self.over: set[int] = set()

    def begin(self, sequence_id: int, prompt: tuple[int, ...], max_length: int) -> None:
        self._answers[sequence_id] = Watched(text_of(prompt, max_length + 1), max_length)

    def attached(self, session: TargetSession) -> None:
        answer = self._answers[session.sequence_id]
        answer.drafted = set()
        answer.epoch = 0

    def received(self, message: Candidate) -> None:
        self._answers[message.sequence_id].drafted |= self.ghosts.get(message, frozenset())

    def committed(self, session: TargetSession) -> None:
        committed, answer = session.committed, self._answers[session.sequence_id]
        if len(committed) < len(answer.committed):
            raise Violation("I1: the committed prefix shrank")
        answer.committed = committed
        if len(committed) > answer.max_length:
            raise Violation("I5: the text is too long")
        if committed != answer.text[: len(committed)]:
            raise Violation("I2: a committed token is not the target's")
        if session.epoch < answer.epoch:
            raise Violation("I3: the target's epoch went back")
        answer.epoch = session.epoch

    def evaluated(self, session: TargetSession, candidates: tuple[int, ...]) -> None:
        answer = self._answers[session.sequence_id]
        prefix = answer.hashes[session.committed_length]
        for offset, token_id in enumerate(candidates):
            if (prefix, token_id) not in answer.drafted:
                position = session.committed_length + offset
                raise Violation(f"I6: candidate {token_id} at {position} was not drafted from what stands before it")
            prefix = prefix_hash.extend(prefix, token_id)

    def scored(self, session: TargetSession, block: Block) -> None:
        answer = self._answers[session.sequence_id]
        prefixes = [answer.hashes[session.committed_length]]
        for token_id, parent in zip(block.token_ids[1:], block.parents, strict=True):
            if (prefixes[parent], token_id) not in answer.drafted:
                raise Violation(f"I6: candidate {token_id} was not drafted from the row before it")
            prefixes.append(prefix_hash.extend(prefixes[parent], token_id))

    def waited(self, ns: int, number: int) -> None:
        if ns > MAX_WAIT_NS or number > MAX_WAITS:
            raise Violation(f"L1: the target has waited for {ns / 1e9:.3f} seconds, {number} times")

    def draft_stepped(self, incarnation: int, session: DraftSession) -> None:
        epoch_before, base_before = self._drafts.get((incarnation, session.sequence_id), (0, 0))
        if session.epoch < epoch_before:
            raise Violation("I3: the draft's epoch went back")
        if session.base < base_before:
            raise Violation("I4: the draft's base went back")
        self._drafts[incarnation, session.sequence_id] = session.epoch, session.base
        end = 1 + max((node.position for node in session.tree.root.below()), default=0)
        if end > min(session.base + session.opening.max_lookahead, session.opening.max_length):
            raise Violation("R1: the draft runs too far ahead")
        if self._answers[session.sequence_id].committed[: session.base] != session.committed:
            raise Violation("I4: the draft's base is not a committed prefix")
