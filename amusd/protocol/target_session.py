"""Which candidates the target may verify in one sequence, given what has arrived. Pure: values in, values out.

    [0, committed_length)                         committed, final
    [committed_length, committed_length + tail)   candidates that follow exactly the committed prefix, not yet verified

The one invariant (I6): every candidate in the tail was drafted from exactly the prefix that stands before it here.
It holds because the target follows the draft's chain of one epoch without a gap: a candidate counts only if it starts
where the chain is known to reach, and wherever chain and committed tokens overlap they are compared.

Rules
    T1  A token that contradicts a committed one ends the chain; its epoch is stale, `floor = max(floor, epoch + 1)`.
    T2  A committed token beyond what the chain has shown so far proves nothing yet; the chain's own token for that
        position is compared when it arrives. (So a bonus token that agrees costs nothing.)
    T3  A gap in the chain ends it as well; the draft offers the rest again under the next epoch.
    T4  `attach` starts a new life of the draft; candidates of any other life are stale.
    T5  The target alone can always go on: `begin(0)`, `commit` of its own token.
    T6  A refused message changes nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from amusd.errors import PeerProtocolError
from amusd.protocol.messages import MAX_EPOCH, Candidate
from amusd.protocol.token_stream import Row
from amusd.protocol.verification import Block, Verification


class Reception(enum.Enum):
    """What became of a candidate message."""

    TAKEN = "taken"
    """Its tokens extend the tail, or agree with what was committed meanwhile."""
    STALE = "stale"
    """From before a rollback, or from another life of the draft."""
    CONTRADICTED = "contradicted"
    """It disagrees with a token committed meanwhile: the chain ended."""
    GAP = "gap"
    """Something before it was lost: the chain ended."""
    FOREIGN = "foreign"
    """Its prefix hash denies that it was drafted from this prefix: I6 is at stake, a bug or a hostile peer; dropped."""


class TargetSession(Verification[Row]):
    """A `Verification` of the candidates of one chain."""

    def __init__(
        self,
        *,
        sequence_id: int,
        prompt: Sequence[int],
        max_length: int,
        vocab_size: int,
        max_lookahead: int,
        wants_rows: bool = False,
    ) -> None:
        """`wants_rows`: each candidate must come with the distribution that it was drawn from."""
        super().__init__(
            sequence_id=sequence_id,
            prompt=prompt,
            max_length=max_length,
            vocab_size=vocab_size,
            max_lookahead=max_lookahead,
        )
        self._wants_rows = wants_rows
        self._block_rows: tuple[Row, ...] = ()
        self._chain_broken = False
        self._epoch_floor = 0
        self._chain_epoch = 0
        self._chain_end = len(prompt)

    # What a policy may look at

    @property
    def num_candidates(self) -> int:
        """Candidates ready for verification."""
        return self._stream.length - self._stream.committed_length

    @property
    def draft_restarting(self) -> bool:
        """The draft starts anew behind the committed prefix, so that nothing of it can be on its way yet.

        Its chain was contradicted and nothing was verified since; or it had ended, and the draft waits for a verdict.
        """
        return self._chain_broken or not self._draft_more

    @property
    def epoch_floor(self) -> int:
        """Candidates of a lower epoch are stale."""
        return self._epoch_floor

    # The draft's side

    def attach(self, incarnation: int) -> None:
        """A draft with this (positive) incarnation is told about the sequence; what an earlier one sent is void."""
        super().attach(incarnation)
        self._epoch_floor = 0
        self._chain_epoch = 0
        self._chain_end = self._draft_base

    def receive(self, candidate: Candidate, rows: Sequence[Row] = ()) -> Reception:
        """Take in a candidate message, and `rows`, which are its `draft_probs` read and checked.

        Raises `PeerProtocolError` for what no correct draft sends.
        """
        addressed = candidate.sequence_id == self.sequence_id and candidate.incarnation == self._incarnation
        if not (addressed and self._attached):
            return Reception.STALE
        self._check(candidate, len(rows))
        if candidate.epoch < self._live_epoch():
            self._draft_base = max(self._draft_base, candidate.base)
            return Reception.STALE
        same_chain = candidate.epoch == self._chain_epoch
        known_end = max(self._chain_end, candidate.base) if same_chain else candidate.base
        tail_end = self._stream.length if same_chain else self._stream.committed_length
        if same_chain:
            self._check_repeats(candidate, tail_end)
        self._follow(candidate)
        if candidate.start > known_end:
            return self._break_chain(Reception.GAP)
        if not self._prefix_fits(candidate):
            return self._break_chain(Reception.FOREIGN)
        overlap = candidate.token_ids[: max(0, self._stream.committed_length - candidate.start)]
        if self._contradicts(candidate.start, overlap):
            return self._break_chain(Reception.CONTRADICTED)
        new = max(0, tail_end - candidate.start)
        self._stream.extend_tail(candidate.token_ids[new:], rows[new:])
        self._chain_end = max(known_end, candidate.start + len(candidate.token_ids))
        return Reception.TAKEN

    # The target's side

    def begin(self, max_candidates: int) -> Block:
        """Start a verification of at most `max_candidates` of the candidates at hand (0 is always possible)."""
        block = super().begin(max_candidates)
        start = block.start + 1
        self._block_rows = self._stream.rows(start, start + len(block.candidates))
        self._chain_broken = False
        return block

    def candidates_to_judge(self) -> tuple[int, ...]:
        """The block's candidates and, if it has arrived by now, the one behind them.

        That late candidate has been seen by no pass, but the pass has scored its position: judging it instead of taking
        a bonus token blindly keeps the draft's chain alive more often, and is exact.
        """
        block = self._verifying()
        start = self._stream.committed_length
        tail = self._stream.slice(start, min(start + len(block.candidates) + 1, self._stream.length))
        if tail[: len(block.candidates)] != block.candidates:
            return block.candidates
        return tail

    def rows_to_judge(self) -> tuple[Row, ...]:
        """The distributions that `candidates_to_judge` were drawn from; none where the draft sends none.

        Those of the block are kept with it: its chain may end during the pass, which does not undo what was drawn.
        """
        end = self._stream.committed_length + len(self._verifying().candidates)
        num_late = len(self.candidates_to_judge()) - len(self._verifying().candidates)
        return self._block_rows + self._stream.rows(end, end + num_late)

    # Inside

    def _live_epoch(self) -> int:
        return max(self._epoch_floor, self._chain_epoch)

    def _floor_above(self, epoch: int) -> int:
        # Not `floor + 1`: the draft may have moved through epochs of which nothing ever arrived.
        return max(self._epoch_floor, epoch + 1)

    def _prefix_fits(self, candidate: Candidate) -> bool:
        return candidate.prefix_hash == self._stream.hash_before(candidate.start)

    def _contradicts(self, start: int, token_ids: Sequence[int]) -> bool:
        return self._stream.matching_prefix(start, token_ids) < len(token_ids)

    def _follow(self, candidate: Candidate) -> None:
        if candidate.epoch != self._chain_epoch:
            self._stream.truncate(self._stream.committed_length)
            self._chain_epoch = candidate.epoch
            self._chain_end = candidate.base
        self._draft_base = max(self._draft_base, candidate.base)
        self._draft_more = candidate.more

    def _break_chain(self, reception: Reception) -> Reception:
        self._stream.truncate(self._stream.committed_length)
        self._epoch_floor = self._floor_above(self._chain_epoch)
        self._chain_broken = True
        return reception

    def _advance(self, token_ids: tuple[int, ...]) -> None:
        start = self._stream.committed_length
        matched = self._stream.matching_prefix(start, token_ids)
        contradicted = matched < min(len(token_ids), self.num_candidates)
        if matched < len(token_ids):
            self._stream.truncate(start + matched)
            self._stream.extend_tail(token_ids[matched:])
        self._stream.commit(start + len(token_ids))
        if contradicted:
            self._break_chain(Reception.CONTRADICTED)

    def _candidates(self, number: int) -> tuple[int, ...]:
        start = self._stream.committed_length
        return self._stream.slice(start, start + number)

    def _forget_candidates(self) -> None:
        self._stream.truncate(self._stream.committed_length)

    def _check(self, candidate: Candidate, num_rows: int) -> None:
        self._check_head(candidate.base, candidate.token_ids)
        if candidate.epoch > MAX_EPOCH:
            raise PeerProtocolError(f"candidate of epoch {candidate.epoch}, at most {MAX_EPOCH} are counted")
        if candidate.start < candidate.base:
            raise PeerProtocolError(f"candidate starts at {candidate.start}, before its own base {candidate.base}")
        if candidate.start + len(candidate.token_ids) > candidate.base + self._max_lookahead:
            raise PeerProtocolError(f"candidate runs further ahead than {self._max_lookahead} tokens")
        if num_rows != (len(candidate.token_ids) if self._wants_rows else 0):
            raise PeerProtocolError(f"candidate of {len(candidate.token_ids)} tokens has {num_rows} rows")

    def _check_repeats(self, candidate: Candidate, tail_end: int) -> None:
        start = max(candidate.start, self._stream.committed_length)
        repeated = candidate.token_ids[start - candidate.start : max(0, tail_end - candidate.start)]
        if self._contradicts(start, repeated):
            raise PeerProtocolError("candidate changes a token offered before in the same epoch")
