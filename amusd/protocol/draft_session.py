"""The draft's state of one sequence: the committed tokens that it knows, and the tree after them. Pure.

Rules, beside those of the tree (`draft_tree.py`)
    R3  Every node is offered once, after its parent, with the hash of the committed prefix. The target begins a new
        epoch after a loss; then all nodes are offered again under new numbers.
    R4  A verdict that adds nothing is ignored. A verdict that contradicts committed tokens is refused.
    R5  A refused message changes nothing.

`RollbackManager` applies changes to the drafter (`amusd/runtime/rollback.py`).
"""

from __future__ import annotations

from amusd.errors import PeerProtocolError
from amusd.protocol.draft_tree import DraftTree, Transition
from amusd.protocol.messages import CERTAINTY, MAX_EPOCH, Candidate, Open, Verdict
from amusd.protocol.prefix_hash import CommittedPrefix

MAX_OFFERED = 128
"""Most nodes of a message: with the largest draft probs, half of a frame."""


class DraftSession:
    """The draft's state of one sequence. Raises `PeerProtocolError` for an impossible `opening`."""

    def __init__(self, opening: Open, *, draft_length: int | None = None, needs_parent: bool = False) -> None:
        """`draft_length`: longest sequence of the drafter; None: any.

        `needs_parent`: no step computes a node together with its parent.
        """
        if not 1 <= len(opening.token_ids) <= opening.max_length:
            raise PeerProtocolError(f"Open with {len(opening.token_ids)} tokens and max_length {opening.max_length}")
        self.opening = opening
        self.sequence_id = opening.sequence_id
        self.tree = DraftTree(opening, draft_length, needs_parent=needs_parent)
        self.epoch = 0
        self._prefix = CommittedPrefix(opening.token_ids)
        self._next_number = 1
        self._said_no_more = False

    @property
    def base(self) -> int:
        """Committed length that the draft knows."""
        return self._prefix.length

    @property
    def committed(self) -> tuple[int, ...]:
        """The committed tokens that the draft knows."""
        return tuple(self._prefix.token_ids)

    def offer(self, step_ns: int = 0) -> Candidate | None:
        """The next message; None while too few nodes are ready, or nothing is new.

        `step_ns`: duration of the last step.
        """
        nodes, rest = self.tree.unsent[:MAX_OFFERED], self.tree.unsent[MAX_OFFERED:]
        more = bool(rest) or self.tree.has_work
        is_short = len(nodes) < min(self.opening.tokens_per_message, MAX_OFFERED)
        if is_short and (more or (self._said_no_more and not nodes)):
            return None
        self.tree.unsent, self._said_no_more = rest, not more
        first, self._next_number = self._next_number, self._next_number + len(nodes)
        for number, node in enumerate(nodes, start=first):
            node.number = number
        weights = [] if self.tree.is_chain else [min(CERTAINTY, round(node.weight * CERTAINTY)) for node in nodes]
        return Candidate(
            sequence_id=self.sequence_id,
            incarnation=self.opening.incarnation,
            base=self.base,
            prefix_hash=self._prefix.hash_before(self.base),
            first=first,
            parents=tuple(node.parent.number if node.parent else 0 for node in nodes),
            token_ids=tuple(node.token_id for node in nodes),
            weights=tuple(weights),
            more=more,
            draft_probs=tuple(node.draft_probs for node in nodes if node.draft_probs),
            step_ns=step_ns,
        )

    def receive(self, verdict: Verdict) -> Transition | None:
        """Take in a verdict; None for a stale one. Raises `PeerProtocolError` for an impossible one."""
        if not self._is_news(verdict):
            return None
        self._check(verdict)
        new = verdict.token_ids[self.base - verdict.start :]
        self._prefix.append(new)
        transition = self.tree.advance(new)
        if verdict.epoch > self.epoch:
            self.epoch = verdict.epoch
            self.tree.offer_again()
        self._said_no_more = False
        return transition

    def _is_news(self, verdict: Verdict) -> bool:
        is_addressed = verdict.sequence_id == self.sequence_id and verdict.incarnation == self.opening.incarnation
        return is_addressed and (verdict.start + len(verdict.token_ids), verdict.epoch) > (self.base, self.epoch)

    def _check(self, verdict: Verdict) -> None:
        committed_length = verdict.start + len(verdict.token_ids)
        if verdict.epoch > MAX_EPOCH:
            raise PeerProtocolError(f"verdict of epoch {verdict.epoch}, at most {MAX_EPOCH} are counted")
        if verdict.start > self.base:
            raise PeerProtocolError(f"verdict starts at {verdict.start}, the draft knows {self.base} tokens alone")
        if committed_length > self.opening.max_length:
            raise PeerProtocolError(f"verdict commits {committed_length} tokens, limit {self.opening.max_length}")
        if tuple(self._prefix.token_ids[verdict.start :]) != verdict.token_ids[: self.base - verdict.start]:
            raise PeerProtocolError("verdict changes tokens that were committed before")
