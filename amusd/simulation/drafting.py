"""What a simulated draft does in one sequence: the real session over guesses that are right where drawn so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from amusd.policies.row_cost import RowCost
from amusd.protocol.draft_session import DraftSession, Guesses
from amusd.protocol.messages import Candidate, Open, Verdict
from amusd.simulation.cost import Costs
from amusd.simulation.joint import Step, StepPart
from amusd.simulation.tokens import draft_token


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of the draft's work: what it is called, how long it takes, what its event says."""

    name: str
    ns: int
    fields: dict[str, Any]


class Drafting:
    """As the real rollback manager over a drafter whose probabilities are the same at every position.

    A real one knows where it is sure and where it is not, and spends its rows accordingly. The effects of a piece of
    work hold from its beginning; nobody sees them before its end, when `offer` is asked.
    """

    def __init__(
        self,
        opening: Open,
        places: Sequence[int],
        weights: Sequence[float],
        costs: Costs,
        random: Random,
        step_cost: RowCost,
        tokens_per_step: int = 1,
    ) -> None:
        """Begin an answer. `step_cost`: as known from earlier ones; `tokens_per_step`: of a chain.

        `places`: of the right guess at each position (`guess_places`); `weights`: probability of each place.
        """
        self._session = DraftSession(opening)
        self._prompt_length = len(opening.token_ids)
        self._places = places
        self._weights = weights
        self._costs = costs
        self._random = random
        self._step_cost = step_cost
        self._tokens_per_step = max(opening.tokens_per_message, tokens_per_step)
        self._step_had_root = False
        self._num_sequences = 1

    @property
    def num_stale(self) -> int:
        """Verdicts ignored as stale."""
        return self._session.num_stale

    def has_work(self) -> bool:
        """Whether something can be drafted before the next verdict."""
        return self._session.has_work

    def can_wait(self) -> bool:
        """The target has candidates for several verdicts, so nothing is urgent before the next one."""
        return bool(self._session.root.children) and not self._session.is_chain

    @property
    def length(self) -> int:
        """With all nodes of the tree."""
        return self._session.base + self._session.num_nodes

    def step(self, target_works: bool) -> StepPart:
        """The likeliest nodes, or the next tokens of a chain; only where there is work."""
        session = self._session
        nodes = session.next_nodes(self._step_cost.share_for_each_of(self._num_sequences))
        positions = [node.position + 1 for node in nodes]
        if session.is_chain:
            positions = list(range(positions[0], positions[0] + min(session.room, self._tokens_per_step)))
        session.grow(nodes, [self._guesses(position) for position in positions])
        self._step_had_root = session.root in nodes
        return StepPart(len(positions), is_tree=not session.is_chain, target_works=target_works, random=self._random)

    def stepped(self, step: Step) -> None:
        """What a row costs is learnt from all rows of the step."""
        self._num_sequences = step.num_sequences
        if not self._step_had_root:
            self._step_cost.passed(step.num_rows, step.ns)

    def apply(self, verdict: Verdict) -> Work | None:
        """Take a verdict in; None when it was stale."""
        transition = self._session.preview(verdict)
        if transition is None:
            return None
        self._session.apply(transition)
        is_rollback = transition.num_discarded > 0
        fields: dict[str, Any] = {
            "num_discarded": transition.num_discarded,
            "num_adopted": len(transition.token_ids),
            "committed_length": transition.committed_length,
            "epoch": transition.epoch,
        }
        if not self._session.is_chain:
            fields["kept_steps"] = [node.step for node in transition.kept]
        duration = self._costs.rollback if is_rollback else self._costs.advance
        return Work("rollback" if is_rollback else "advance", duration.draw(self._random), fields)

    def offer(self) -> Candidate | None:
        """The next message for the target."""
        return self._session.offer()

    def _guesses(self, position: int) -> Guesses:
        """The same behind every token of a position, for nothing behind a wrong one is accepted."""
        index = position - self._prompt_length
        right = self._places[index]
        return [(draft_token(index, place == right, place), weight) for place, weight in enumerate(self._weights)]
