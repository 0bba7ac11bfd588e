"""What every target session shares: the committed prefix, one verification at a time, and which draft is attached.

    [0, committed_length)   committed, final

A session adds which candidates it knows (`target_session.py`: one chain; `tree_target_session.py`: a tree).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from amusd.errors import InvariantError, PeerProtocolError
from amusd.protocol.messages import Verdict
from amusd.protocol.token_stream import Row, TokenStream


@dataclass(frozen=True, slots=True)
class Block:
    """What one target pass takes in: the last committed token, then candidates."""

    start: int
    """Position of the last committed token, `committed_length - 1`."""
    last_token: int
    candidates: tuple[int, ...]
    """One path, each behind the one before it."""
    alternatives: tuple[int, ...] = ()
    """Further candidates, beside and behind those: the likeliest first, and none before its parent."""
    alternative_parents: tuple[int, ...] = ()
    """Of each alternative: the row of `token_ids` that it follows."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Input of the forward pass; without alternatives, the tokens at `[start, start + 1 + len(candidates))`."""
        return (self.last_token, *self.candidates, *self.alternatives)

    @property
    def parents(self) -> tuple[int, ...]:
        """Of each row but the first: the row that it follows."""
        return (*range(len(self.candidates)), *self.alternative_parents)

    def next_row(self, row: int, token_id: int | None = None) -> int | None:
        """The row with `token_id` behind `row`, or the likeliest one behind it; None: there is none."""
        token_ids = self.token_ids
        for number, parent in enumerate(self.parents, start=1):
            if parent == row and token_id in (None, token_ids[number]):
                return number
        return None

    def path_along(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Rows, the first one among them, of as many of these tokens as there are candidates for one after another."""
        rows = [0]
        for token_id in token_ids:
            row = self.next_row(rows[-1], token_id)
            if row is None:
                break
            rows.append(row)
        return tuple(rows)

    def num_rescued(self, accepted: Sequence[int]) -> int:
        """How many of the accepted tokens are alternatives."""
        return sum(row > len(self.candidates) for row in self.path_along(accepted)) if self.alternatives else 0

    def judged_along(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The path whose candidates were judged one after another when these tokens were accepted.

        They and the likeliest ones behind them; without alternatives, all candidates.
        """
        rows = list(self.path_along(token_ids))
        while (row := self.next_row(rows[-1])) is not None:
            rows.append(row)
        return tuple(self.token_ids[row] for row in rows[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOutcome:
    """What came of one target pass."""

    num_candidates: int
    """On the one path that it was made for."""
    num_judged: int
    """Candidates tested one after another, had each been accepted; a late one included."""
    num_accepted: int
    num_alternatives: int
    num_rescued: int
    """Of the accepted ones, those that were alternatives."""
    num_tokens: int
    """Committed."""

    @property
    def num_late_accepted(self) -> int:
        """Candidates accepted that came while the pass was under way: one or none."""
        return int(self.num_accepted > self.num_candidates and not self.num_rescued)


class Verification(abc.ABC, Generic[Row]):
    """The target's state of one sequence. No draft is attached at first."""

    def __init__(
        self, *, sequence_id: int, prompt: Sequence[int], max_length: int, vocab_size: int, max_lookahead: int
    ) -> None:
        if not prompt:
            raise ValueError("a prompt has at least one token")
        if max_length <= len(prompt):
            raise ValueError(f"max_length {max_length} leaves no room behind a prompt of {len(prompt)} tokens")
        self.sequence_id = sequence_id
        self.max_length = max_length
        self.prompt_length = len(prompt)
        self._vocab_size = vocab_size
        self._max_lookahead = max_lookahead
        self._stream = TokenStream[Row](prompt)
        self._block: Block | None = None
        self._num_accepted = 0
        self._attached = False
        self._incarnation = 0
        self._draft_base = len(prompt)
        self._draft_more = True

    # What a policy may look at

    @property
    def committed(self) -> tuple[int, ...]:
        """All final tokens, prompt included."""
        return self._stream.committed

    @property
    def committed_length(self) -> int:
        """How many they are."""
        return self._stream.committed_length

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.max_length - self._stream.committed_length

    @property
    @abc.abstractmethod
    def num_candidates(self) -> int:
        """Candidates ready for verification."""

    @property
    def weights(self) -> tuple[float, ...]:
        """What the draft says of each of them, in the order of a pass; nothing where it says nothing."""
        return ()

    @property
    def attached(self) -> bool:
        """A draft works on this sequence."""
        return self._attached

    @property
    def may_get_more(self) -> bool:
        """Waiting makes sense: the draft has not said that it is done with the present committed prefix."""
        return self._attached and (self._draft_more or self._draft_base < self._stream.committed_length)

    @property
    @abc.abstractmethod
    def draft_restarting(self) -> bool:
        """The draft starts anew behind the committed prefix, so that nothing of it can be on its way yet."""

    # The draft's side

    def attach(self, incarnation: int) -> None:
        """A draft with this (positive) incarnation is told about the sequence; what an earlier one sent is void."""
        if incarnation <= self._incarnation:
            raise PeerProtocolError(f"incarnation {incarnation} follows {self._incarnation}: must rise")
        self.detach()
        self._attached = True
        self._incarnation = incarnation
        # The opening message carries all that is committed.
        self._draft_base = self._stream.committed_length
        self._draft_more = True

    def detach(self) -> None:
        """The draft is gone: forget its candidates and go on alone."""
        self._attached = False
        self._forget_candidates()

    # The target's side

    def begin(self, max_candidates: int) -> Block:
        """Start a verification of at most `max_candidates` of the candidates at hand (0 is always possible).

        One less than `remaining` at most: the pass commits one more token than it accepts.
        """
        if self._block is not None:
            raise InvariantError("a verification is already under way")
        if self.remaining < 1:
            raise InvariantError("the sequence is full")
        start = self._stream.committed_length - 1
        candidates = self._candidates(max(0, min(max_candidates, self.num_candidates, self.remaining - 1)))
        self._block = Block(start, self._stream.slice(start, start + 1)[0], candidates)
        return self._block

    def candidates_to_judge(self) -> tuple[int, ...]:
        """The block's candidates, and what else the pass has scored by now."""
        return self._verifying().candidates

    def rows_to_judge(self) -> tuple[Row, ...]:
        """The distributions that `candidates_to_judge` were drawn from; none where the draft sends none."""
        return ()

    def commit(self, token_ids: Sequence[int], num_accepted: int, *, ends: bool = False) -> PassOutcome:
        """End the verification: `token_ids` are final, the first `num_accepted` of them were candidates.

        `ends`: the answer ends with them, as it does without being told where `remaining` is reached; the candidates
        behind its end were not judged. Raises `InvariantError` when the acceptance rule produced what it must not;
        nothing is changed then.
        """
        tokens = tuple(token_ids)
        block, accepted = self._verifying(), tokens[:num_accepted]
        judged = block.judged_along(accepted) if block.alternatives else self.candidates_to_judge()
        if not 1 <= len(tokens) <= self.remaining:
            raise InvariantError(f"{len(tokens)} tokens to commit, between 1 and {self.remaining} allowed")
        if not (num_accepted <= len(judged) and num_accepted <= len(tokens) <= num_accepted + 1):
            raise InvariantError(f"{len(tokens)} tokens with {num_accepted} accepted of {len(judged)} candidates")
        if accepted != judged[:num_accepted]:
            raise InvariantError("accepted tokens are not the candidates")
        self._block = None
        self._num_accepted = num_accepted
        self._advance(tokens)
        return PassOutcome(
            num_candidates=len(block.candidates),
            num_judged=min(len(judged), len(tokens)) if ends or not self.remaining else len(judged),
            num_accepted=num_accepted,
            num_alternatives=len(block.alternatives),
            num_rescued=block.num_rescued(accepted),
            num_tokens=len(tokens),
        )

    def verdict(self) -> Verdict:
        """The newest, cumulative verdict; may be sent at any time, and again."""
        start = self._draft_base
        return Verdict(
            sequence_id=self.sequence_id,
            incarnation=self._incarnation,
            epoch_floor=self.epoch_floor,
            start=start,
            token_ids=self._stream.slice(start, self._stream.committed_length),
            num_accepted=self._num_accepted,
        )

    @property
    def epoch_floor(self) -> int:
        """Candidates of a lower epoch are stale; 0 where there are no epochs."""
        return 0

    # What a session adds

    @abc.abstractmethod
    def _candidates(self, number: int) -> tuple[int, ...]:
        """The first `number` of those at hand, 0 to `num_candidates`."""

    @abc.abstractmethod
    def _advance(self, token_ids: tuple[int, ...]) -> None:
        """Commit them, and keep what agrees with them."""

    @abc.abstractmethod
    def _forget_candidates(self) -> None:
        """All of them."""

    def _verifying(self) -> Block:
        if self._block is None:
            raise InvariantError("no verification is under way")
        return self._block

    def _check_head(self, base: int, token_ids: Sequence[int]) -> None:
        """What every message of a draft has. Raises `PeerProtocolError`."""
        committed_length = self._stream.committed_length
        if not self.prompt_length <= base <= committed_length:
            raise PeerProtocolError(f"candidate builds on {base} tokens, {committed_length} are committed")
        if any(not 0 <= token_id < self._vocab_size for token_id in token_ids):
            raise PeerProtocolError(f"candidate has an id outside [0, {self._vocab_size})")
