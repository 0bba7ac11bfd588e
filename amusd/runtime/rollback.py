"""The rollback manager: the tree of a draft and what its drafter keeps of it go back together, or not at all.

    session           [0, base) committed, and a tree behind it
    drafter           the same committed tokens, and keys and values of the nodes that it has computed

A verdict is previewed on the session (which checks it and changes nothing), carried out on the drafter, and only then
applied to the session. A drafter that fails halfway is opened again with all that is committed, and the tree is
dropped on both sides. If that fails too, the session is left as it was and the error is raised: the draft is no more.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from amusd.drafters.base import Drafter
from amusd.errors import RankLostError, RollbackError
from amusd.policies.row_cost import RowCost
from amusd.protocol.draft_session import DraftSession, Guesses, Transition
from amusd.protocol.messages import Candidate, Open, Verdict
from amusd.sampling.acceptance import certain

logger = logging.getLogger(__name__)


class RollbackManager:
    """Owns one sequence of the draft: its session and its drafter, which always agree."""

    def __init__(self, opening: Open, drafter: Drafter, step_cost: RowCost | None = None) -> None:
        """`step_cost`: of trees, what is known from earlier sequences of this drafter."""
        self.session = DraftSession(opening)
        self.drafter = drafter
        self.num_looked_up = 0
        """Tokens drafted outside of steps."""
        self._step_cost = step_cost or RowCost()
        self._num_guesses = 0  # computed in the last step
        self._capacity = opening.max_length
        self._fan_out = opening.fan_out
        self._sends_rows = opening.distribution.rule == "rejection"
        drafter.open(opening.token_ids, self._capacity, self._fan_out)
        self._check_agreement(self.session.base)
        self._look_up()

    @property
    def has_work(self) -> bool:
        """Something is worth computing before the next verdict."""
        return self.session.has_work

    @property
    def can_wait(self) -> bool:
        """The target has candidates for several verdicts, so nothing is urgent before the next one.

        A chain never has all that the next block could take.
        """
        return bool(self.session.root.children) and not self.session.is_chain

    @property
    def length(self) -> int:
        """Committed tokens and nodes."""
        return self.session.base + self.session.num_nodes

    def propose(self) -> int:
        """One step: compute the likeliest nodes. Returns how many, or how many tokens were added to a chain."""
        session, drafter = self.session, self.drafter
        nodes = session.next_nodes(self._step_cost.row_share)
        self._num_guesses = len(nodes) - (session.root in nodes)
        if not nodes:
            return 0
        num_tokens = min(session.room, max(session.tokens_per_message, drafter.tokens_per_step))
        found = drafter.expand(session.root, nodes, num_tokens)
        session.grow(nodes, found, self._rows(found) if self._sends_rows else ())
        return len(found)

    def stepped(self, ns: int) -> None:
        """That step took this long. One over the root tells nothing of others: it follows a miss, caches are cold."""
        if self._num_guesses:
            self._step_cost.passed(self._num_guesses, ns)

    def offer(self) -> Candidate | None:
        """The next message for the target."""
        return self.session.offer()

    def apply(self, verdict: Verdict) -> Transition | None:
        """Bring everything in line with `verdict`; None when it was stale.

        Raises `PeerProtocolError` for an impossible verdict (nothing changes), and `RollbackError` when the drafter
        could neither follow nor be opened again: the session is unchanged, but this draft cannot go on.
        """
        transition = self.session.preview(verdict)
        if transition is None:
            return None
        try:
            self.drafter.follow(transition)
            self._check_agreement(transition.committed_length, len(transition.alive))
        except RankLostError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever went wrong, it may be mended
            logger.warning("the drafter could not follow a verdict, and is opened again: %r", error)
            transition = self._reopened(transition)
        self.session.apply(transition)
        self._look_up()
        return transition

    def close(self) -> None:
        """Release the drafter."""
        self.drafter.close()

    def _reopened(self, transition: Transition) -> Transition:
        """With a drafter that has taken in what the verdict commits, and nothing else."""
        transition = self.session.without_tree(transition)
        try:
            self.drafter.open((*self.session.committed, *transition.token_ids), self._capacity, self._fan_out)
            self._check_agreement(transition.committed_length)
        except RankLostError:
            raise
        except Exception as error:
            raise RollbackError(f"the drafter could not be opened again: {error}") from error
        return transition

    def _look_up(self) -> None:
        self.num_looked_up += self.session.guess_path(*self.drafter.look_up())

    def _rows(self, found: Sequence[Guesses]) -> tuple[bytes, ...]:
        """What each token was drawn from. One that was not drawn, but looked up, was certain."""
        return self.drafter.take_rows() or tuple(certain(token_id) for ((token_id, _),) in found)

    def _check_agreement(self, committed_length: int, num_nodes: int = 0) -> None:
        expected = committed_length + (num_nodes if self.session.is_chain else 0)
        if self.drafter.length != expected:
            raise RollbackError(f"drafter holds {self.drafter.length} tokens, session {expected}")
