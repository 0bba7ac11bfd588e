"""A drafter that scores several tokens at once from the target's hidden states (Medusa, DFlash).

All nodes at one distance from the root have the same guesses, which are computed with the root.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amusd.config import GREEDY, Distribution
from amusd.drafters.base import Drafter, path_to, say_not_finite
from amusd.errors import NotFiniteError
from amusd.models.block_models import BlockModel
from amusd.models.passes import check_finite
from amusd.protocol.draft_session import MIN_PROBABILITY, Guesses, Node, Transition
from amusd.sampling.ranking import Ranking
from amusd.sampling.sampler import SamplingState


class BlockDrafter(Drafter):
    """Drafts chains and trees with a `model`."""

    def __init__(self, model: BlockModel) -> None:
        self._model = model
        self._state = model.new_state()
        self._distribution = GREEDY
        self._context: list[int] = []
        self._num_drafted = 0
        self._is_chain = self._is_ready = False
        self._scores = torch.empty(0)
        """[places, columns] of the tokens from `_first` on."""
        self._first = 0
        self._guesses: dict[int, Guesses] = {}

    @property
    def length(self) -> int:
        """Committed tokens; for a chain, with the drafted ones."""
        return len(self._context) + self._num_drafted

    @property
    def tokens_per_step(self) -> int:
        """All places that are scored."""
        return self._model.max_depth

    @property
    def max_length(self) -> int:
        """The model's."""
        return self._model.max_length

    @property
    def is_ready(self) -> bool:
        """Whether the feature before the last token has come, or a verdict."""
        return self._is_ready

    def set_distribution(self, distribution: Distribution) -> None:
        """See `Drafter`; under the ratio test nodes are ranked by likelihood."""
        self._distribution = GREEDY if distribution.rule == "rejection" else distribution

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:  # noqa: ARG002 - the session minds it
        """Compute nothing yet."""
        self._state.clear()
        self._context = list(token_ids)
        self._is_chain, self._num_drafted = fan_out == 1, 0
        self._is_ready = len(token_ids) == 1
        self._scores, self._guesses = torch.empty(0), {}
        self._ranking = Ranking(
            self._distribution,
            SamplingState(self._model.vocab_size, self._model.output_ids, self._model.device),
            token_ids,
            number=fan_out,
            min_probability=MIN_PROBABILITY,
        )

    def take_features(self, start: int, features: Tensor) -> None:
        """See `Drafter`."""
        rows, width = features.shape
        if width != self._model.feature_width:
            raise ValueError(f"{width} numbers a token, the drafter reads {self._model.feature_width}")
        if start < 0 or start + rows > self._model.max_length:
            raise ValueError(f"positions {start} to {start + rows} of {self._model.max_length}")
        self._state.take(start, features)
        self._is_ready = self._is_ready or start + rows >= len(self._context) - 1

    def expand(self, root: Node, nodes: Sequence[Node], num_tokens: int = 1) -> Sequence[Guesses]:
        """Score all places where `nodes` is the root; then the guesses behind each node."""
        if nodes[0] is root:
            self._scores, self._first = self._state.score(root.position, root.token_id), root.position + 1
            self._guesses = {}
        if not self._is_chain:
            return [self._guess(node.position + 1, path_to(root, node)) for node in nodes]
        (last,) = nodes
        path, found = path_to(root, last), []
        for position in range(last.position + 1, last.position + 1 + num_tokens):
            guesses = self._guess(position, path)
            if not guesses:
                break
            found.append([(guesses[0][0], 1.0)])  # a chain goes on however unlikely it is
            path.append(guesses[0][0])
        self._num_drafted += len(found)
        return found

    def follow(self, transition: Transition) -> None:
        """Take in what is committed; after a verdict no features are waited for."""
        self._context += [node.token_id for node in transition.kept]
        self._context += transition.token_ids
        self._num_drafted = len(transition.alive) if self._is_chain else 0
        self._is_ready = True

    def close(self) -> None:
        """Keep the memory for the next sequence."""
        self._state.clear()
        self._context, self._num_drafted = [], 0

    def _guess(self, position: int, path: Sequence[int]) -> Guesses:
        place = position - self._first
        if not 0 <= place < len(self._scores):
            return ()
        if not self._ranking.needs_context and position in self._guesses:
            return self._guesses[position]
        self._ranking.see(self._context)
        words, scores = self._ranking.rows_behind(position - len(path), [path]), self._scores[place : place + 1]
        try:
            check_finite(float(scores.max()))
            (guesses,) = self._ranking.rank(scores, words)
        except NotFiniteError as error:
            say_not_finite(error)
            return ()
        self._guesses[position] = guesses
        return guesses
