"""A language model that drafts a tree: several nodes a step, each giving a few ranked guesses of what follows it.

slots     where keys and values lie: [0, prompt - 1) the prompt, above that one for each node that was computed
prefix    the slots of committed tokens, in order; a node that the target confirms just joins it, nothing is moved
pending   committed tokens that the model has not computed; the root is the last of them, unless it was computed
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from amusd.config import GREEDY, Distribution
from amusd.drafters.base import Drafter, say_not_finite
from amusd.drafters.ngram import NgramCache
from amusd.errors import NotFiniteError
from amusd.models.cached_model import CachedModel
from amusd.models.language_model import DigestRequest
from amusd.protocol.draft_session import MAX_NODES, MIN_PROBABILITY, Guesses, Node, Transition
from amusd.sampling.digest import Digests
from amusd.sampling.ranking import Ranking

LOOKUP_WEIGHT = 0.85
"""How often each token of a looked-up continuation is right (`experiments/embedded_draft/README.md`)."""
LOOKUP_TOKENS = 8
"""Of one lookup at most."""


class ModelTreeDrafter(Drafter):
    """Drafts with `model`; mixed with `ngrams`, if given, which also adds what repeats itself."""

    def __init__(self, model: CachedModel, ngrams: NgramCache | None = None, *, num_ids: int | None = None) -> None:
        """`num_ids`: reduce ids to `[0, num_ids)` before the model sees them (a model that only spends time)."""
        self._model = model
        self._num_ids = num_ids
        self._ngrams = ngrams
        self._cache = model.new_cache(model.max_length, spare=MAX_NODES)
        self._digests = Digests.of(model)
        if self._digests is not None:
            model.prepare(self._cache, (None, self._digests.few, self._digests.many))
        self._num_slots = model.max_length + MAX_NODES
        self._distribution = GREEDY
        self._context: list[int] = []
        self._slots: dict[Node, int] = {}
        """Of each computed node."""
        self._paths: dict[Node, tuple[int, ...]] = {}
        """Of each computed node: the slots behind the prefix that lead to it, its own last."""

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self._context)

    def set_distribution(self, distribution: Distribution) -> None:
        """Nodes are ranked as the target would choose."""
        self._distribution = distribution

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        """Prefill all but the last token. Raises `ValueError` beyond the model's length."""
        if capacity > self._model.max_length:
            raise ValueError(f"a sequence of {capacity} tokens: this draft model takes {self._model.max_length}")
        self._slots, self._paths = {}, {}
        self._context = list(token_ids)
        self._pending = [len(token_ids) - 1]  # positions
        self._cache.truncate(0)
        self._model.prefill(token_ids[:-1], self._cache)
        self._prefix = np.arange(self._num_slots)  # of which the first `_num_computed` count
        self._num_computed = len(token_ids) - 1
        self._free = list(range(self._num_slots - 1, len(token_ids) - 2, -1))  # the lowest is taken first
        self._ranking = Ranking(
            self._distribution,
            self._model.vocab_size,
            self._model.output_ids,
            number=fan_out,
            min_probability=MIN_PROBABILITY,
            num_prompt_tokens=len(token_ids),
            digests=self._digests,
        )
        if self._ngrams is not None:
            self._ngrams.open(token_ids)

    def expand(self, root: Node, nodes: Sequence[Node], num_tokens: int = 1) -> list[Guesses]:  # noqa: ARG002
        """One pass over `nodes`; over the committed tokens that are still missing, where they are the root."""
        if nodes[0] is root:
            return self._compute_pending()
        for node in nodes:
            slot = self._free.pop()
            above = () if node.parent is None or node.parent is root else self._paths[node.parent]
            self._slots[node], self._paths[node] = slot, (*above, slot)
        tokens, paths = [node.token_id for node in nodes], [self._paths[node] for node in nodes]
        return self._pass(tokens, paths, [_path(root, node) for node in nodes])

    def follow(self, transition: Transition) -> None:
        """Keys of kept nodes join the prefix where they lie; slots of nodes that are gone become free."""
        num_computed = self._num_computed
        for node in transition.kept:
            slot = self._slots.pop(node, None)
            self._paths.pop(node, None)
            if slot is None:
                self._pending.append(node.position)
            else:
                self._append_to_prefix([slot])
            self._context.append(node.token_id)
        for token_id in transition.token_ids:
            self._pending.append(len(self._context))
            self._context.append(token_id)
        left = set(transition.alive)
        for node in [node for node in self._slots if node not in left]:
            self._free.append(self._slots.pop(node))
            del self._paths[node]
        if num_joined := self._num_computed - num_computed:
            self._paths = {node: path[num_joined:] for node, path in self._paths.items()}
        if self._ngrams is not None:
            self._ngrams.commit(self._context[self._ngrams.length :])

    def look_up(self) -> tuple[tuple[int, ...], float]:
        """What followed the longest suffix when it occurred before."""
        found = () if self._ngrams is None else self._ngrams.continuation(LOOKUP_TOKENS)
        return found, LOOKUP_WEIGHT if found else 0.0

    def close(self) -> None:
        """Keep the cache's memory for the next sequence."""
        self._cache.truncate(0)
        self._slots, self._paths = {}, {}

    def _compute_pending(self) -> list[Guesses]:
        """The committed tokens that are missing, as many passes as they need; the guesses behind the last one."""
        while True:
            part = self._pending[: self._model.max_rows(0)]
            del self._pending[: len(part)]
            slots = [self._free.pop() for _ in part]
            tokens = [self._context[position] for position in part]
            paths = [slots[: row + 1] for row in range(len(slots))]
            guesses = self._pass(tokens, paths, () if self._pending else ([],))
            self._append_to_prefix(slots)
            if guesses:
                return guesses

    def _pass(
        self, tokens: Sequence[int], paths: Sequence[Sequence[int]], behind: Sequence[Sequence[int]]
    ) -> list[Guesses]:
        """One pass; guesses behind its last rows. `behind`: for each of these, the tokens from the root to it."""
        if self._num_ids is not None:
            tokens = [token_id % self._num_ids for token_id in tokens]
        ranking, prefix = self._ranking, self._prefix[: self._num_computed]
        positions = [len(self._context) + len(path) for path in behind]
        contexts = [[*self._context, *path] for path in behind] if ranking.needs_contexts else ()
        mixtures = [self._ngrams.guesses(path) for path in behind] if self._ngrams is not None else ()
        wanted = None
        if ranking.digest is not None and behind:
            inputs = ranking.inputs(positions, contexts, mixtures)
            others = np.repeat(inputs[:1], len(tokens) - len(inputs), axis=0)  # of rows that nobody looks at
            wanted = DigestRequest(ranking.digest, np.concatenate((others, inputs)))
        output = self._model.forward_tree(tokens, prefix, paths, self._cache, wanted)
        if not behind:
            return []
        digests = None if output.digests is None else output.digests[-len(behind) :]
        try:
            ranked = ranking.rank(output.logits[-len(behind) :], positions, contexts, mixtures, digests)
        except NotFiniteError as error:
            say_not_finite(error)
            self._cache.wipe()  # what was committed behind the prompt is lost, too: it costs guesses
            return [()] * len(behind)
        return [tuple(zip(row.token_ids, row.probabilities, strict=True)) for row in ranked]

    def _append_to_prefix(self, slots: Sequence[int]) -> None:
        end = self._num_computed + len(slots)
        self._prefix[self._num_computed : end] = slots
        self._num_computed = end


def _path(root: Node, node: Node) -> list[int]:
    """The tokens that lead from `root` to `node`."""
    path: list[int] = []
    here: Node | None = node
    while here is not None and here is not root:
        path.append(here.token_id)
        here = here.parent
    return path[::-1]
