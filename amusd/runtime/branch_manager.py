"""Owns one sequence of a draft that prepares for several verdicts: its tree and what the drafter keeps of it.

The counterpart of `rollback.RollbackManager`: a verdict is previewed on the session, carried out on the drafter, then
applied; what it foresaw is adopted in the same call that would else roll back.
"""

from __future__ import annotations

from amusd.drafters.tree import TreeDrafter
from amusd.errors import RollbackError
from amusd.policies.row_cost import RowCost
from amusd.protocol.messages import Open, Prepared, Verdict
from amusd.protocol.tree_draft_session import Adoption, TreeDraftSession


class BranchManager:
    """A tree session and its drafter. `step_cost` is known from earlier sequences of such a drafter."""

    def __init__(self, opening: Open, drafter: TreeDrafter, step_cost: RowCost) -> None:
        self.session = TreeDraftSession(opening)
        self.drafter = drafter
        self._step_cost = step_cost
        self._capacity = opening.max_length
        self._fan_out = opening.fan_out
        self.num_looked_up = 0
        self._num_guesses = 0  # computed in the last step
        drafter.open_tree(opening.token_ids, self._capacity, self._fan_out)
        self._look_up()

    @property
    def has_work(self) -> bool:
        """Something is worth computing before the next verdict."""
        return self.session.has_work

    @property
    def can_wait(self) -> bool:
        """The target has candidates, so nothing is urgent before the next verdict."""
        return bool(self.session.root.children)

    @property
    def length(self) -> int:
        """Committed tokens and nodes."""
        return self.session.base + self.session.num_nodes

    def propose(self) -> int:
        """One step: compute the likeliest nodes. Returns how many."""
        nodes = self.session.next_nodes(self._step_cost.row_share)
        self._num_guesses = len(nodes) - (self.session.root in nodes)
        if not nodes:
            return 0
        for node, guesses in zip(nodes, self.drafter.compute(self.session.root, nodes), strict=True):
            self.session.grow(node, guesses)
        return len(nodes)

    def stepped(self, ns: int) -> None:
        """That step took this long. One over the root tells nothing of others: it follows a miss, caches are cold."""
        if self._num_guesses:
            self._step_cost.passed(self._num_guesses, ns)

    def offer(self) -> Prepared | None:
        """The next message for the target."""
        return self.session.offer()

    def apply(self, verdict: Verdict) -> Adoption | None:
        """Bring everything in line with `verdict`; None when it was stale.

        Raises `PeerProtocolError` for an impossible verdict (nothing changes), and `RollbackError` when the drafter
        could not follow: this sequence cannot go on then.
        """
        adoption = self.session.preview(verdict)
        if adoption is None:
            return None
        self.session.apply(adoption)
        try:
            self.drafter.adopt(adoption.kept, adoption.token_ids, tuple(self.session.root.below()))
        except Exception as error:
            raise RollbackError(f"the drafter could not follow {len(adoption.token_ids)} tokens") from error
        self._look_up()
        return adoption

    def close(self) -> None:
        """Release the drafter."""
        self.drafter.close()

    def _look_up(self) -> None:
        tokens, weight = self.drafter.look_up()
        self.num_looked_up += self.session.guess_path(tokens, weight)
