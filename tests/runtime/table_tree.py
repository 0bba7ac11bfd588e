"""A drafter of trees over a table model, which checks what it is asked to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from passes import forward, prefilled
from runtime.pair import target_model
from table_model import TableModel
from torch import Tensor

from amusd.drafters.base import Drafter, path_to
from amusd.drafters.ngram import NgramCache
from amusd.drafters.synthetic import right_with_probability
from amusd.drafters.tree import LOOKUP_TOKENS, LOOKUP_WEIGHT
from amusd.protocol.draft_tree import Guesses, Node, Transition
from amusd.sampling.ranking import Ranking
from amusd.sampling.sampler import SamplingState

WEIGHTS = (0.8, 0.1, 0.05, 0.03)

Places = Callable[[int], int]
"""Position -> at which rank the likeliest token is guessed; beyond the fan-out: not at all."""


def first() -> Places:
    return lambda _position: 0


def spread(seed: int) -> Places:
    """The right token is at rank 0 with probability 0.6, otherwise at each further rank with 0.5."""

    def place(position: int) -> int:
        if right_with_probability(0.6, seed)(position):
            return 0
        return next((rank for rank in (1, 2) if right_with_probability(0.5, seed + rank)(position)), 9)

    return place


class TableTreeDrafter(Drafter):
    """Ranks guesses by `model`, recomputing each node's path; `places` moves the best token to another rank."""

    def __init__(
        self, model: TableModel | None = None, places: Places | None = None, ngrams: NgramCache | None = None
    ) -> None:
        self._model = model or target_model()
        self.max_length = self._model.max_length
        self._places = places or first()
        self._ngrams = ngrams
        self._row = lru_cache(maxsize=4096)(self._compute_row)

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        assert len(token_ids) <= capacity
        super().open(token_ids, capacity, fan_out)
        self._computed: set[Node] = set()
        vocab_size = self._model.vocab_size
        number = min(fan_out + 1, vocab_size)
        self._ranking = Ranking(self.distribution, SamplingState(vocab_size), token_ids, number=number)
        if self._ngrams is not None:
            self._ngrams.open(self.committed)

    def expand(self, root: Node, nodes: Sequence[Node], room: int = 1) -> list[Guesses]:
        assert (root.position, root.token_id) == (len(self.committed) - 1, self.committed[-1])
        assert nodes[0] is root or (root.computed and root not in nodes)
        assert len(nodes) == 1 or nodes[0] is not root
        found: list[Guesses] = []
        for node in nodes:
            assert node not in self._computed
            assert node is root or node.parent is root or node.parent in self._computed
            found.append(self._guesses(root, node))
            self._computed.add(node)
        return found

    def follow(self, transition: Transition) -> None:
        kept, token_ids, alive = transition.kept, transition.token_ids, transition.alive
        assert not (token_ids and alive)
        assert [node.position for node in kept] == [len(self.committed) + number for number in range(len(kept))]
        super().follow(transition)
        self._computed &= set(alive)

    def look_up(self) -> tuple[Sequence[int], float]:
        tokens = () if self._ngrams is None else self._ngrams.continuation(LOOKUP_TOKENS)[0]
        return tokens, LOOKUP_WEIGHT if tokens else 0.0

    def close(self) -> None:
        self._computed = set()

    def _guesses(self, root: Node, node: Node) -> Guesses:
        context = (*self.committed, *path_to(root, node))
        self._ranking.see(context)
        (ranked,) = self._ranking.rank(self._row(context), self._ranking.inputs_after(len(context), [()]))
        best, *others = (token_id for token_id, _ in ranked)
        others.insert(self._places(len(context)), best)
        return list(zip(others[: self.fan_out], WEIGHTS, strict=False))

    def _compute_row(self, context: tuple[int, ...]) -> Tensor:
        cache = prefilled(self._model, context[:-1], len(context))
        return forward(self._model, context[-1:], cache).logits
