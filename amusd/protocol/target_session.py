"""The target's state of one sequence: committed tokens and candidates. Pure: values in, values out.

    [0, committed_length)     committed, final
    after it                  a tree of candidates (`candidate_tree.py`)

The invariant (I6 of docs/protocol.md): every candidate in the tree was drafted from exactly the prefix before it here.
The draft numbers its nodes and names each parent; 0 is the committed prefix that the message builds on (its base).
Tokens that are committed keep their subtree; all else is dropped.

Rules
    T1  A node counts if its parent is in the tree, a committed token, or 0. At a committed position, a node must be
        the committed token; so a bonus token that agrees costs nothing.
    T2  Committed nodes are remembered by number until the draft builds on a longer prefix.
    T3  The candidates at hand are the path of the likeliest children, the first among equals. A pass over several paths
        takes the likeliest nodes instead.
    T4  A gap in the numbers is a lost message: a new epoch begins, and with the next verdict the draft offers its
        tree again.
    T5  `attach` begins with a new draft process; nodes of any other incarnation are stale.
    T6  The target alone can always go on (`begin(0)`, `commit` of its own token). A refused message changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, repeat
from typing import Any

from amusd.errors import PeerProtocolError
from amusd.protocol.candidate_tree import MAX_NUMBERS, CandidateNode, CandidateTree, Reception
from amusd.protocol.messages import CERTAINTY, Candidate, Verdict
from amusd.protocol.prefix_hash import CommittedPrefix
from amusd.protocol.verification import Block, PassOutcome, Tracks


class TargetSession:
    """The target's state of one sequence. No draft is attached at first."""

    def __init__(
        self,
        *,
        sequence_id: int,
        prompt: Sequence[int],
        max_length: int,
        vocab_size: int,
        fan_out: int = 1,
        wants_draft_probs: bool = False,
    ) -> None:
        """`fan_out`: the draft's; above 1 each candidate has a weight.

        `wants_draft_probs`: each candidate must come with the distribution that it was drawn from.
        """
        self.sequence_id = sequence_id
        self.max_length = max_length
        self.prompt_length = len(prompt)
        self._vocab_size = vocab_size
        self._is_chain = fan_out == 1
        self._wants_draft_probs = wants_draft_probs
        self._prefix = CommittedPrefix(prompt)
        self._tree = CandidateTree(self._prefix, max_length)
        self._block: Block | None = None
        self.attached = False
        self.epoch = 0
        """How often candidates of the present draft process were lost."""
        self._incarnation = 0
        self._next_number = 1
        self._draft_base = len(prompt)
        self._draft_more = True
        self._contradicted = False

    # What a policy may look at

    @property
    def committed(self) -> tuple[int, ...]:
        """All final tokens, prompt included."""
        return tuple(self._prefix.token_ids)

    @property
    def committed_length(self) -> int:
        """Number of committed tokens."""
        return self._prefix.length

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.max_length - self._prefix.length

    @property
    def candidates(self) -> tuple[int, ...]:
        """The tokens of the likeliest path."""
        return tuple(node.token_id for node in self._tree.path())

    @property
    def num_candidates(self) -> int:
        """The length of the likeliest path."""
        return len(self._tree.path())

    @property
    def weights(self) -> tuple[float, ...]:
        """The draft's probability of each candidate given those before it; empty for a chain."""
        return () if self._is_chain else tuple(node.weight / CERTAINTY for node in self._tree.path())

    @property
    def may_get_more(self) -> bool:
        """Whether the draft may send more for the present prefix."""
        return self.attached and (self._draft_more or self._draft_base < self._prefix.length)

    @property
    def draft_restarting(self) -> bool:
        """Whether the draft starts anew: its chain was contradicted or had ended, or its tree is empty."""
        if self._is_chain:
            return self._contradicted or not self._draft_more
        return not self._tree.children

    # The draft's side

    def attach(self, incarnation: int) -> None:
        """Begin with a draft of this incarnation (from 1); candidates of earlier ones are stale."""
        if incarnation <= self._incarnation:
            raise PeerProtocolError(f"incarnation {incarnation} follows {self._incarnation}: must rise")
        self.detach()
        self.attached = True
        self._incarnation = incarnation
        self.epoch, self._next_number = 0, 1
        # The opening message carries all committed tokens.
        self._draft_base = self._prefix.length
        self._draft_more = True

    def detach(self) -> None:
        """Forget the lost draft's candidates."""
        self.attached = False
        self._tree = CandidateTree(self._prefix, self.max_length)

    def receive(self, candidate: Candidate, draft_probs: Sequence[Any] = ()) -> Reception:
        """Take in candidates; `draft_probs`: unpacked ones. Raises `PeerProtocolError` for impossible ones."""
        addressed = candidate.sequence_id == self.sequence_id and candidate.incarnation == self._incarnation
        if not (addressed and self.attached):
            return "stale"
        self._check(candidate, len(draft_probs))
        if not self._prefix_fits(candidate):  # breaks I6
            raise PeerProtocolError(f"candidate was drafted from another prefix of {candidate.base} tokens")
        if candidate.base > self._draft_base:
            self._draft_base = candidate.base
            self._tree.forget_before(candidate.base)
        self._draft_more = candidate.more
        self.epoch += candidate.first > self._next_number  # T4
        self._next_number = max(self._next_number, candidate.first + len(candidate.token_ids))
        weights = candidate.weights or repeat(CERTAINTY)
        nodes = map(CandidateNode, candidate.token_ids, count(candidate.first), weights, draft_probs or repeat(None))
        placed = zip(nodes, candidate.parents, strict=True)
        found = {self._tree.add(node, candidate.base, parent) for node, parent in placed}
        self._contradicted |= "contradicted" in found
        if not found or "taken" in found:
            return "taken"
        return "contradicted" if "contradicted" in found else "stale"

    # The target's side

    def begin(
        self, max_candidates: int, *, num_tracks: int = 1, max_rows: int | None = None, min_chance: float = 0.0
    ) -> Block:
        """Start a verification of a path of at most `max_candidates` candidates; 0 is always allowed.

        At most `remaining` - 1 fit, as a pass commits one token more than it accepts. With several tracks the block has
        the `max_rows` - 1 likeliest candidates, each of at least `min_chance`.
        """
        if self._block is not None:
            raise AssertionError("a verification is already under way")
        if self.remaining < 1:
            raise AssertionError("the sequence is full")
        depth = min(max_candidates, self.remaining - 1)
        number = depth if max_rows is None else max_rows - 1
        self._block = self._tree.block(depth, Tracks(num_tracks), number, min_chance)
        self._contradicted = False
        return self._block

    def to_judge(self) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        """The candidates to judge, a late one included, and the distribution of each.

        Judging that late candidate instead of taking a bonus token is exact, and saves the draft's tree more often.
        """
        block = self._verifying()
        late = self._tree.likeliest_after(block.candidates)
        if late is None:
            return block.candidates, block.draft_probs
        return (*block.candidates, late.token_id), (*block.draft_probs, late.draft_probs)

    def commit(self, token_ids: Sequence[int], num_accepted: int, *, ends: bool = False) -> PassOutcome:
        """End the verification: `token_ids` are final, the first `num_accepted` of them were candidates.

        `ends`: the answer ends with `token_ids`. Raises `AssertionError`, without any change, for impossible arguments.
        """
        tokens = tuple(token_ids)
        block, accepted = self._verifying(), tokens[:num_accepted]
        judged = block.judged_along(accepted) if block.alternatives else self.to_judge()[0]
        if not 1 <= len(tokens) <= self.remaining:
            raise AssertionError(f"{len(tokens)} tokens to commit, between 1 and {self.remaining} allowed")
        if not (num_accepted <= len(judged) and num_accepted <= len(tokens) <= num_accepted + 1):
            raise AssertionError(f"{len(tokens)} tokens with {num_accepted} accepted of {len(judged)} candidates")
        if accepted != judged[:num_accepted]:
            raise AssertionError("accepted tokens are not the candidates")
        self._block = None
        self._prefix.append(tokens)
        self._contradicted |= self._tree.advance(tokens)
        return PassOutcome(
            num_candidates=len(block.candidates),
            num_judged=min(len(judged), len(tokens)) if ends or not self.remaining else len(judged),
            num_accepted=num_accepted,
            num_alternatives=len(block.alternatives),
            num_accepted_alternatives=block.sources_along(accepted, num_accepted).count("alternative"),
            num_tokens=len(tokens),
        )

    def verdict(self) -> Verdict:
        """The newest, cumulative verdict; may be sent again."""
        start = self._draft_base
        return Verdict(
            sequence_id=self.sequence_id,
            incarnation=self._incarnation,
            epoch=self.epoch,
            start=start,
            token_ids=tuple(self._prefix.token_ids[start:]),
        )

    # What arrives

    def _prefix_fits(self, candidate: Candidate) -> bool:
        return candidate.prefix_hash == self._prefix.hash_before(candidate.base)

    def _check(self, candidate: Candidate, num_probs: int) -> None:
        num_nodes = len(candidate.token_ids)
        if not self.prompt_length <= candidate.base <= self._prefix.length:
            raise PeerProtocolError(f"candidate builds on {candidate.base} tokens, {self._prefix.length} are committed")
        if any(not 0 <= token_id < self._vocab_size for token_id in candidate.token_ids):
            raise PeerProtocolError(f"candidate has an id outside [0, {self._vocab_size})")
        if num_nodes > MAX_NUMBERS:
            raise PeerProtocolError(f"{num_nodes} nodes in one message, at most {MAX_NUMBERS} are taken")
        if len(candidate.parents) != num_nodes or len(candidate.weights) != (0 if self._is_chain else num_nodes):
            raise PeerProtocolError("nodes without a parent or a weight each, or a chain with weights")
        if candidate.first < 1 or any(
            not 0 <= parent < candidate.first + index for index, parent in enumerate(candidate.parents)
        ):
            raise PeerProtocolError("a node's parent must have a lower number than it has")
        if any(not 0 <= weight <= CERTAINTY for weight in candidate.weights):
            raise PeerProtocolError(f"a weight outside [0, {CERTAINTY}]")
        if num_probs != (num_nodes if self._wants_draft_probs else 0):
            raise PeerProtocolError(f"candidate of {num_nodes} tokens has {num_probs} distributions")

    def _verifying(self) -> Block:
        if self._block is None:
            raise AssertionError("no verification is under way")
        return self._block
