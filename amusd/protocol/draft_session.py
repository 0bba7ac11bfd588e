"""What the draft side may do next in one sequence, given the verdicts it has heard. Pure: values in, values out.

Rules
    R1  The draft is never more than `max_lookahead` tokens ahead of the committed prefix it knows.
    R2  Its epoch rises exactly when drafted tokens are thrown away, or when the target's floor demands it; then what is
        left of the tail is offered again under the new epoch.
    R3  Every drafted token is offered at most once per epoch, in order, with the hash of the prefix before it.
    R4  A verdict that adds nothing is ignored; one that contradicts what the target committed before is refused.
    R5  A refused message changes nothing.

A verdict is applied in two steps, `preview` and `apply`, so that token stream, cache and drafter can go back together
(`amusd/runtime/rollback.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from amusd.protocol.drafting import Drafting
from amusd.protocol.messages import Candidate, Open, Verdict


@dataclass(frozen=True, slots=True)
class Transition:
    """What a verdict does to the stream: keep `[0, keep)`, then `token_ids`, then whatever of the tail survives.

    `num_discarded > 0` is a rollback; otherwise either the tail reaches beyond the verdict and all of it stays
    (`token_ids` is empty and `keep` is the old length), or the verdict reaches beyond the tail and continues it.
    """

    keep: int
    """Stream length to cut to."""
    token_ids: tuple[int, ...]
    """The target's own tokens that follow."""
    committed_length: int
    """Committed length afterwards."""
    num_discarded: int
    """Drafted tokens thrown away."""
    epoch: int
    """Epoch afterwards."""


class DraftSession(Drafting):
    """The draft's state of one sequence, opened by `opening`."""

    def __init__(self, opening: Open) -> None:
        super().__init__(opening)
        self._tokens_per_message = opening.tokens_per_message
        self._offered_length = self._stream.length
        self._exhausted = False
        self._said_no_more = False

    @property
    def epoch(self) -> int:
        """Counts the times that drafted tokens were thrown away, as far as both sides know."""
        return self._epoch

    @property
    def length(self) -> int:
        """Stream length, tail included."""
        return self._stream.length

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The whole stream."""
        return self._stream.slice(0, self._stream.length)

    @property
    def room(self) -> int:
        """How many more tokens may be drafted before the next verdict.

        The last position below `max_length` is never drafted: the target fills it in the pass that gets there.
        """
        if self._exhausted:
            return 0
        limit = min(self.base + self._max_lookahead, self._max_length - 1)
        return max(0, limit - self.length)

    @property
    def tokens_per_message(self) -> int:
        """Candidates go out once this many are ready."""
        return self._tokens_per_message

    def extend(self, token_ids: Sequence[int], rows: Sequence[bytes] = ()) -> None:
        """Take in what the drafter proposed; nothing at all means that it has no proposal until the next verdict.

        `rows`: under the ratio test, the distribution that each token was drawn from. Raises `ValueError` on more
        tokens than there is `room` for.
        """
        if len(token_ids) > self.room:
            raise ValueError(f"{len(token_ids)} tokens proposed, room for {self.room}")
        if not token_ids:
            self._exhausted = True
        self._stream.extend_tail(token_ids, rows)

    def offer(self) -> Candidate | None:
        """The next message for the target, or None while there is nothing (or too little) to say."""
        more = self.room > 0
        num_ready = self.length - self._offered_length
        if more and num_ready < self._tokens_per_message:
            return None
        if num_ready == 0 and self._said_no_more:
            return None
        candidate = Candidate(
            sequence_id=self.sequence_id,
            incarnation=self.incarnation,
            epoch=self._epoch,
            base=self.base,
            start=self._offered_length,
            token_ids=self._stream.slice(self._offered_length, self.length),
            prefix_hash=self._stream.hash_before(self._offered_length),
            more=more,
            draft_probs=self._stream.rows(self._offered_length, self.length),
        )
        self._offered_length = self.length
        self._said_no_more = not more
        return candidate

    def preview(self, verdict: Verdict) -> Transition | None:
        """What `apply` would do; None for a stale verdict. Changes nothing but the count of stale ones.

        Raises `PeerProtocolError` for a verdict that no correct target sends.
        """
        new = self._news(verdict)
        if new is None:
            return None
        return self._transition(new, verdict.epoch_floor)

    def apply(self, transition: Transition) -> None:
        """Carry out what `preview` returned, with nothing in between."""
        offered_again = transition.epoch != self._epoch and transition.num_discarded == 0
        self._stream.truncate(transition.keep)
        self._stream.extend_tail(transition.token_ids)
        self._stream.commit(transition.committed_length)
        self._epoch = transition.epoch
        # What was thrown away, or has become final, needs no offering; a new epoch starts its offers at the base.
        self._offered_length = max(min(self._offered_length, transition.keep), self.base)
        if offered_again:
            self._offered_length = self.base
        self._exhausted = False
        self._said_no_more = False

    def _transition(self, token_ids: tuple[int, ...], epoch_floor: int) -> Transition:
        matched = self._stream.matching_prefix(self.base, token_ids)
        tail_length = self.length - self.base
        contradicted = matched < len(token_ids) and matched < tail_length
        keep = self.base + matched if contradicted else self.length
        return Transition(
            keep=keep,
            token_ids=token_ids[matched:],
            committed_length=self.base + len(token_ids),
            num_discarded=self.length - keep,
            epoch=max(self._epoch + int(contradicted), epoch_floor),
        )
