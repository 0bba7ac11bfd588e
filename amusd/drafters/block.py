"""A drafter that scores several tokens at once from the target's hidden states (Medusa, DFlash).

All nodes at one distance from the root share one row of scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from amusd.checkpoints.draft_networks import BlockModel
from amusd.drafters.base import Drafter, path_to, say_not_finite
from amusd.errors import NotFiniteError
from amusd.models.passes import check_finite
from amusd.protocol.draft_tree import MIN_PROBABILITY, Guesses, Node
from amusd.protocol.prefix_hash import num_common
from amusd.runner.graphs import fetch, wait_for
from amusd.sampling.ranking import Ranking
from amusd.sampling.sampler import SamplingState


class BlockDrafter(Drafter):
    """Drafts chains and trees with a `model`."""

    draws = False

    def __init__(self, model: BlockModel) -> None:
        self._model = model
        self.max_length = model.max_length
        self._state = model.new_state()
        self._fetch = partial(fetch, wait=partial(wait_for, model.device))
        self._sampling = SamplingState(model.vocab_size, model.output_ids, model.device, fetch=self._fetch)

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        """Compute nothing yet."""
        self._state.truncate(num_common(self.committed, token_ids[:-1]))
        super().open(token_ids, capacity, fan_out)
        self.is_ready = len(token_ids) == 1
        self._scored: Node | None = None
        least = MIN_PROBABILITY
        self._ranking = Ranking(self.distribution, self._sampling, token_ids, number=fan_out, min_probability=least)

    def take_features(self, start: int, features: Tensor) -> None:
        """See `Drafter`."""
        rows, width = features.shape
        if width != self._model.feature_width:
            raise ValueError(f"{width} numbers a token, the drafter reads {self._model.feature_width}")
        self._state.take(start, features)
        self.is_ready = self.is_ready or start + rows >= self.length - 1

    def propose(self, path: Sequence[int], room: int) -> Sequence[int]:
        """The likeliest token of each place."""
        text: list[int] = [*path]
        while len(text) < len(path) + room and (guesses := self._guess(text)):
            text.append(guesses[0][0])
        return text[len(path) :]

    def expand(self, root: Node, nodes: Sequence[Node], room: int = 1) -> Sequence[Guesses]:
        """See `Drafter`; all places are scored at once, and again when the root has moved."""
        if root is not self._scored:  # a verdict may make a computed node the root
            self._scores = self._state.score(root.position, root.token_id % self._model.num_ids)
            self._largest = self._fetch(self._scores.float().amax(1)).numpy()
            self._guesses: dict[int, Guesses] = {}
            self._scored = root
        if self.fan_out == 1:
            return super().expand(root, nodes, room)
        return [self._guess(path_to(root, node)) for node in nodes]

    def _guess(self, path: Sequence[int]) -> Guesses:
        place = len(path)
        if place >= len(self._scores):
            return ()
        if not self._ranking.needs_context and place in self._guesses:
            return self._guesses[place]
        self._ranking.see(self.committed)
        inputs, scores = self._ranking.inputs_after(self.length, [path]), self._scores[place : place + 1]
        try:
            check_finite(self._largest[place])
            (guesses,) = self._ranking.rank(scores, inputs)
        except NotFiniteError as error:
            say_not_finite(error)
            return ()
        self._guesses[place] = guesses
        return guesses
