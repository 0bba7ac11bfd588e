"""A language model that drafts a tree: several nodes a step, each giving a few ranked guesses.

slots     of keys and values: [0, prompt - 1) the prompt, above that one for each computed node
prefix    the slots of committed tokens, in order; a confirmed node joins it, nothing is moved
pending   committed tokens that are not computed; the root is the last of them, unless computed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from typing_extensions import Self

from amusd.config import GREEDY, Distribution
from amusd.drafters.base import Drafter, Expansion, path_to, say_not_finite
from amusd.drafters.ngram import LOOKUP_TOKENS, NgramCache
from amusd.errors import NotFiniteError
from amusd.models.cached_model import CachedModel
from amusd.models.kv_cache import KVCache
from amusd.models.passes import ModelOutput, Places, Rows, SamplerRows
from amusd.protocol.draft_session import MAX_NODES, MIN_PROBABILITY, Guesses, Node, Transition
from amusd.sampling.ranking import Mixture, Ranking, RowRanker
from amusd.sampling.sampler import DRAFT_LEVELS, SamplingState, samplers_of

LOOKUP_WEIGHT = 0.85
"""How often a token of a looked-up continuation is right (`experiments/embedded_draft/README.md`)."""


TreePart: TypeAlias = tuple[Rows, Sequence[Mixture]]
"""A tree's rows of a pass, and what is known of the tokens behind each of the last ones; nothing without a lookup."""


class ModelTreeDrafter(Drafter):
    """Drafts with `model`; mixed with `ngrams`, if given, which also adds repetitions."""

    def __init__(
        self,
        model: CachedModel,
        ngrams: NgramCache | None = None,
        *,
        num_ids: int | None = None,
        cache: KVCache | None = None,
    ) -> None:
        """`num_ids`: reduce ids to `[0, num_ids)` (for a model that only spends time).

        `cache`: one of `new_caches(number, model.max_length, spare=MAX_NODES)`.
        """
        self.model = model
        self._num_ids = num_ids
        self._ngrams = ngrams
        self._cache = model.new_cache(model.max_length, spare=MAX_NODES) if cache is None else cache
        model.prepare(self._cache, samplers_of(model, self._cache, DRAFT_LEVELS, RowRanker))
        self._num_slots = model.max_length + MAX_NODES
        self._distribution = GREEDY
        self._context: list[int] = []
        self._is_chain = False
        self._num_drafted = 0
        self._paths: dict[Node, tuple[int, ...]] = {}

    @property
    def length(self) -> int:
        """Committed tokens; for a chain, with the drafted ones."""
        return len(self._context) + (self._num_drafted if self._is_chain else 0)

    @property
    def max_length(self) -> int:
        """The model's."""
        return self.model.max_length

    def set_distribution(self, distribution: Distribution) -> None:
        """Nodes are ranked as the target would choose."""
        self._distribution = distribution

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:  # noqa: ARG002 - the session minds it
        """Prefill all but the last token."""
        self._paths = {}
        self._context = list(token_ids)
        self._is_chain, self._num_drafted = fan_out == 1, 0
        self._cache.truncate(0)
        self._prefix = np.arange(self._num_slots)  # of which the first `_num_computed` count
        num_computed = self._prefill()
        self._pending = list(range(num_computed, len(token_ids)))  # positions
        state, sequence = SamplingState.of(self.model, self._cache)
        self._ranking = Ranking(
            self._distribution,
            state,
            token_ids,
            number=fan_out,
            min_probability=0.0 if self._is_chain else MIN_PROBABILITY,  # a chain goes on however unlikely it is
            sequence=sequence,
        )
        if self._ngrams is not None:
            self._ngrams.open(token_ids)

    def _prefill(self) -> int:
        self._num_computed = len(self._context) - 1
        self.model.prefill(self._context[:-1], self._cache)
        self._free = list(range(self._num_slots - 1, self._num_computed - 1, -1))  # the lowest is taken first
        return self._num_computed

    @classmethod
    def expand_together(cls, drafters: Sequence[Self], parts: Sequence[Expansion]) -> list[Sequence[Guesses]]:
        """One pass over all trees' nodes; for a root, over the missing committed tokens."""
        planned = [drafter.plan(part) for drafter, part in zip(drafters, parts, strict=True)]
        outputs = drafters[0].model.run([rows for rows, _ in planned])
        together = zip(drafters, parts, planned, outputs, strict=True)
        return [drafter.rank(len(part.nodes), own, output) for drafter, part, own, output in together]

    def follow(self, transition: Transition) -> None:
        """Kept nodes' slots join the prefix; those of dropped nodes become free."""
        num_computed = self._num_computed
        for node in transition.kept:
            path = self._paths.pop(node, None)
            if path is None:
                self._pending.append(node.position)
            else:
                self._append_to_prefix(path[-1:])
            self._context.append(node.token_id)
        for token_id in transition.token_ids:
            self._pending.append(len(self._context))
            self._context.append(token_id)
        left = set(transition.alive)
        self._num_drafted = len(left)
        for node in [node for node in self._paths if node not in left]:
            self._free.append(self._paths.pop(node)[-1])
        if num_joined := self._num_computed - num_computed:
            self._paths = {node: path[num_joined:] for node, path in self._paths.items()}
        if self._ngrams is not None:
            self._ngrams.commit(self._context[self._ngrams.length :])

    def look_up(self) -> tuple[tuple[int, ...], float]:
        """What followed the longest suffix before; empty for a chain, which has one guess."""
        found = () if self._ngrams is None or self._is_chain else self._ngrams.continuation(LOOKUP_TOKENS)
        return found, LOOKUP_WEIGHT if found else 0.0

    def close(self) -> None:
        """Keep the cache's memory for the next sequence."""
        self._cache.truncate(0)
        self._paths = {}

    def plan(self, expansion: Expansion) -> TreePart:
        """The rows of `expansion`. Committed tokens that do not fit are computed here."""
        root, nodes = expansion.root, expansion.nodes
        if nodes[0] is not root:
            for node in nodes:
                above = () if node.parent is None or node.parent is root else self._paths[node.parent]
                self._paths[node] = (*above, self._free.pop())
            tokens, paths = [node.token_id for node in nodes], [self._paths[node] for node in nodes]
            return self._part(tokens, paths, [path_to(root, node) for node in nodes])
        most = self.model.numerics.max_rows(0)
        while len(self._pending) > most:
            self.model.run([self._pending_part(most, ())[0]])
        return self._pending_part(most, ([],))

    def _pending_part(self, most: int, behind: Sequence[Sequence[int]]) -> TreePart:
        positions = self._pending[:most]
        del self._pending[:most]
        slots = [self._free.pop() for _ in positions]
        tokens = [self._context[position] for position in positions]
        paths = [slots[: row + 1] for row in range(len(slots))]
        part = self._part(tokens, paths, behind)
        self._append_to_prefix(slots)  # behind what `part` has of it
        return part

    def _part(self, tokens: Sequence[int], paths: Sequence[Sequence[int]], behind: Sequence[Sequence[int]]) -> TreePart:
        if self._num_ids is not None:
            tokens = [token_id % self._num_ids for token_id in tokens]
        wanted, mixtures = None, [self._ngrams.guesses(path) for path in behind] if self._ngrams is not None else ()
        if behind:
            self._ranking.see(self._context)
            others = len(tokens) - len(behind)
            words = self._ranking.rows_behind(len(self._context), behind, mixtures, others)
            wanted = SamplerRows(self._ranking.sampler, words)
        places = Places(self._prefix[: self._num_computed], paths)
        return Rows(tokens, self._cache, wanted, places=places), mixtures

    def rank(self, number: int, part: TreePart, output: ModelOutput) -> Sequence[Guesses]:
        """Rank the tokens behind the last `number` rows by the logits of the pass."""
        rows, mixtures = part
        assert rows.wanted is not None
        try:
            output.check()
            outputs = None if output.outputs is None else output.outputs[-number:]
            ranked = self._ranking.rank(output.logits[-number:], rows.wanted.inputs[-number:], mixtures, outputs)
        except NotFiniteError as error:
            say_not_finite(error)
            self._cache.wipe()  # what was committed behind the prompt is lost, too: it costs guesses
            return [] if self._is_chain else [()] * number
        self._num_drafted += sum(map(len, ranked))
        return ranked

    def _append_to_prefix(self, slots: Sequence[int]) -> None:
        end = self._num_computed + len(slots)
        self._prefix[self._num_computed : end] = slots
        self._num_computed = end
