"""The rollback manager: token stream, cache and drafter state go back together, or not at all.

    session stream   [0, base) committed  [base, length) tail
    drafter context  [0, length)                                the same tokens
    drafter cache    [0, at most length - 1)                    inside the drafter

A verdict is previewed on the session (which checks it and changes nothing), carried out on the drafter, and only then
applied to the session. If the drafter fails halfway it is opened again from the session's unchanged stream, so that the
two still agree, and the error is raised.
"""

from __future__ import annotations

from amusd.drafters.base import Drafter, SamplingDrafter
from amusd.errors import RollbackError
from amusd.protocol.draft_session import DraftSession, Transition
from amusd.protocol.messages import Candidate, Open, Verdict
from amusd.sampling.rows import certain


class RollbackManager:
    """Owns one sequence of the draft: its session and its drafter, always at the same length."""

    def __init__(self, opening: Open, drafter: Drafter) -> None:
        self.session = DraftSession(opening)
        self.drafter = drafter
        self._capacity = opening.max_length
        self._sends_rows = opening.distribution.rule == "rejection"
        self._draws = drafter if isinstance(drafter, SamplingDrafter) else None
        drafter.open(opening.token_ids, self._capacity)
        self._check_agreement()

    @property
    def has_work(self) -> bool:
        """The drafter may go on before the next verdict."""
        return self.session.room > 0

    @property
    def can_wait(self) -> bool:
        """A chain never has all that the next block could take."""
        return False

    @property
    def num_looked_up(self) -> int:
        """Tokens drafted outside of steps: a chain has none."""
        return 0

    @property
    def length(self) -> int:
        """Tokens that the draft holds, drafted ones included."""
        return self.session.length

    def propose(self) -> int:
        """One step: let the drafter propose into the room that the session leaves. Returns how many tokens it did."""
        session, drafter = self.session, self.drafter
        wanted = min(session.room, max(session.tokens_per_message, drafter.tokens_per_step))
        proposed = drafter.propose(wanted)
        session.extend(proposed, self._rows(proposed) if self._sends_rows else ())
        self._check_agreement()
        return len(proposed)

    def offer(self) -> Candidate | None:
        """The next message for the target."""
        return self.session.offer()

    def apply(self, verdict: Verdict) -> Transition | None:
        """Bring everything in line with `verdict`; None when it was stale.

        Raises `PeerProtocolError` for an impossible verdict (nothing changes), and `RollbackError` when the drafter
        could not follow (the verdict is not applied, and the drafter holds the session's stream again).
        """
        transition = self.session.preview(verdict)
        if transition is None:
            return None
        try:
            if transition.num_discarded:
                self.drafter.truncate(transition.keep)
            if transition.token_ids:
                self.drafter.commit(transition.token_ids)
        except Exception as error:
            self.drafter.open(self.session.token_ids, self._capacity)
            raise RollbackError(f"the drafter could not follow {transition}") from error
        self.session.apply(transition)
        self._check_agreement()
        return transition

    def close(self) -> None:
        """Release the drafter."""
        self.drafter.close()

    def _rows(self, proposed: tuple[int, ...]) -> tuple[bytes, ...]:
        """What each token was drawn from. One that was not drawn, but looked up, was certain."""
        drawn = () if self._draws is None else self._draws.take_rows()
        return drawn or tuple(certain(token_id) for token_id in proposed)

    def _check_agreement(self) -> None:
        if self.drafter.length != self.session.length:
            raise RollbackError(
                f"drafter holds {self.drafter.length} tokens, session {self.session.length} "
                f"(committed {self.session.base}, epoch {self.session.epoch})"
            )
