"""What every draft session shares: the committed prefix as the draft knows it, and which verdicts are news.

    [0, base)   committed, as far as the draft knows

A session adds what it has drafted behind it (`draft_session.py`: one chain; `tree_draft_session.py`: a tree).
"""

from __future__ import annotations

from amusd.errors import PeerProtocolError
from amusd.protocol.messages import MAX_EPOCH, Open, Verdict
from amusd.protocol.token_stream import TokenStream
from amusd.protocol.wire import MAX_TOKENS

MAX_FAN_OUT = 1 << 12
"""Candidates behind one token, and nodes of one step, at most."""


def check_opening(opening: Open) -> None:
    """Raises `PeerProtocolError` for what no correct target sends. Costs nothing, unlike a session."""
    if not opening.token_ids:
        raise PeerProtocolError("Open without tokens: nothing to draft from")
    if not len(opening.token_ids) <= opening.max_length <= MAX_TOKENS:
        raise PeerProtocolError(f"Open with {len(opening.token_ids)} tokens and max_length {opening.max_length}")
    if opening.max_lookahead < 1 or opening.tokens_per_message < 1:
        raise PeerProtocolError("Open with max_lookahead or tokens_per_message below 1")
    if opening.fan_out and opening.rows_per_step < 1:
        raise PeerProtocolError("Open with a fan_out and rows_per_step below 1")
    if max(opening.fan_out, opening.rows_per_step) > MAX_FAN_OUT:
        raise PeerProtocolError(f"Open with fan_out or rows_per_step above {MAX_FAN_OUT}")


class Drafting:
    """The draft's state of one sequence, opened by `opening`. Raises `PeerProtocolError` for an impossible one."""

    def __init__(self, opening: Open) -> None:
        check_opening(opening)
        self.sequence_id = opening.sequence_id
        self.incarnation = opening.incarnation
        self.num_stale = 0
        self._max_length = opening.max_length
        self._max_lookahead = opening.max_lookahead
        self._stream = TokenStream[bytes](opening.token_ids)
        self._epoch = 0

    @property
    def base(self) -> int:
        """Committed length that the draft knows."""
        return self._stream.committed_length

    def _news(self, verdict: Verdict) -> tuple[int, ...] | None:
        """The tokens that it commits behind `base`; None for a stale verdict, which is counted.

        Raises `PeerProtocolError` for a verdict that no correct target sends.
        """
        committed_length = verdict.start + len(verdict.token_ids)
        addressed = verdict.sequence_id == self.sequence_id and verdict.incarnation == self.incarnation
        news = committed_length > self.base or (committed_length == self.base and verdict.epoch_floor > self._epoch)
        if not (addressed and news):
            self.num_stale += 1
            return None
        if verdict.epoch_floor > MAX_EPOCH:
            raise PeerProtocolError(f"verdict for epoch {verdict.epoch_floor}, at most {MAX_EPOCH} are counted")
        if verdict.start > self.base:
            raise PeerProtocolError(
                f"verdict starts at {verdict.start}, behind a gap: the draft knows {self.base} tokens"
            )
        if committed_length > self._max_length:
            raise PeerProtocolError(f"verdict commits {committed_length} tokens, limit {self._max_length}")
        known = verdict.token_ids[: self.base - verdict.start]
        if self._stream.matching_prefix(verdict.start, known) < len(known):
            raise PeerProtocolError("verdict changes tokens that were committed before")
        return verdict.token_ids[self.base - verdict.start :]
