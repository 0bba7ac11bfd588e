"""A simulated draft that prepares for several verdicts: the real session over guesses that are right where drawn so."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from amusd.policies.row_cost import RowCost
from amusd.protocol.messages import Open, Prepared, Verdict
from amusd.protocol.tree_draft_session import Node, TreeDraftSession
from amusd.simulation.cost import Costs
from amusd.simulation.draft import Work, verdict_work
from amusd.simulation.joint import Step, StepPart
from amusd.simulation.tokens import draft_token


class TreeDrafting:
    """As the real branch manager over a drafter whose probabilities are the same at every position.

    A real one knows where it is sure and where it is not, and spends its rows accordingly.
    """

    def __init__(
        self,
        opening: Open,
        places: Sequence[int],
        weights: Sequence[float],
        costs: Costs,
        random: Random,
        step_cost: RowCost,
    ) -> None:
        """Begin an answer. `step_cost`: as known from earlier ones.

        `places`: of the right guess at each position (`guess_places`); `weights`: probability of each place.
        """
        self._session = TreeDraftSession(opening)
        self._prompt_length = len(opening.token_ids)
        self._places = places
        self._weights = weights
        self._costs = costs
        self._random = random
        self._step_cost = step_cost
        self._step_had_root = False
        self._num_sequences = 1

    @property
    def num_stale(self) -> int:
        """As the session counts them."""
        return self._session.num_stale

    def has_work(self) -> bool:
        """While a node is worth computing."""
        return self._session.has_work

    def can_wait(self) -> bool:
        """While something is prepared for the committed prefix."""
        return bool(self._session.root.children)

    @property
    def length(self) -> int:
        """With all nodes of the tree."""
        return self._session.base + self._session.num_nodes

    def step(self, target_works: bool) -> StepPart:
        """The likeliest nodes."""
        session = self._session
        nodes = session.next_nodes(self._step_cost.share_for_each_of(self._num_sequences))
        for node in nodes:
            session.grow(node, self._guesses(node))
        self._step_had_root = session.root in nodes
        return StepPart(len(nodes), is_tree=True, target_works=target_works, random=self._random)

    def stepped(self, step: Step) -> None:
        """What a row costs is learnt from all rows of the step."""
        self._num_sequences = step.num_sequences
        if not self._step_had_root:
            self._step_cost.passed(step.num_rows, step.ns)

    def apply(self, verdict: Verdict) -> Work | None:
        """As the real branch manager does."""
        adoption = self._session.preview(verdict)
        if adoption is None:
            return None
        self._session.apply(adoption)
        kept_steps = [node.step for node in adoption.kept]
        return verdict_work(adoption, self._costs, self._random, kept_steps=kept_steps)

    def offer(self) -> Prepared | None:
        """As the session has it."""
        return self._session.offer()

    def _guesses(self, node: Node) -> list[tuple[int, float]]:
        """What may follow it: the same behind every token of a position, for nothing behind a wrong one is accepted."""
        position = node.position + 1 - self._prompt_length
        right = self._places[position]
        return [(draft_token(position, place == right, place), weight) for place, weight in enumerate(self._weights)]
