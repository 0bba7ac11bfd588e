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

from amusd.drafters.autoregressive import AutoregressiveDrafter
from amusd.drafters.base import Expansion, path_to
from amusd.drafters.ngram import LOOKUP_TOKENS, NgramCache
from amusd.errors import NotFiniteError
from amusd.models.cached_model import CachedModel
from amusd.models.kv_cache import KVCache
from amusd.models.passes import ModelOutput, Paths, Rows, SamplerRows
from amusd.protocol.draft_session import MAX_NODES, MIN_PROBABILITY, Guesses, Node, Transition
from amusd.sampling.ranking import Mixture, Ranking, RowRanker
from amusd.sampling.sampler import DRAFT_LEVELS, SamplingState, SequenceSampler, samplers_of

LOOKUP_WEIGHT = 0.85
"""How often a token of a looked-up continuation is right (`experiments/embedded_draft/README.md`)."""

TreePart: TypeAlias = tuple[Rows, Sequence[Mixture]]
"""A tree's rows of a pass, and what is known of the tokens behind each of the last ones; nothing without a lookup."""


class ModelTreeDrafter(AutoregressiveDrafter):
    """Drafts trees, and chains as its base does; `ngrams` are mixed with the guesses and add repetitions."""

    def __init__(self, model: CachedModel, ngrams: NgramCache | None = None, *, cache: KVCache | None = None) -> None:
        """`cache`: one of `new_caches(number, model.max_length, spare=MAX_NODES)`."""
        cache = model.new_cache(model.max_length, spare=MAX_NODES) if cache is None else cache
        super().__init__(model, ngrams, cache=cache)
        self._num_slots = model.max_length + MAX_NODES
        self._paths: dict[Node, tuple[int, ...]] = {}

    @property
    def is_chain(self) -> bool:
        """Whether it drafts as its base does."""
        return self.fan_out == 1

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        """Prefill all but the last token."""
        self._paths = {}
        self._prefix = np.arange(self._num_slots)  # of which the first `_num_computed` count
        super().open(token_ids, capacity, fan_out)
        self._num_computed = len(token_ids) - 1
        self._free = list(range(self._num_slots - 1, self._num_computed - 1, -1))  # the lowest is taken first
        self._pending = [self._num_computed]  # positions

    @classmethod
    def expand_together(cls, drafters: Sequence[Self], parts: Sequence[Expansion]) -> list[Sequence[Guesses]]:
        """One pass over all trees' nodes; for a root, over the missing committed tokens."""
        if drafters[0].is_chain:
            return super().expand_together(drafters, parts)
        planned = [drafter.plan(part) for drafter, part in zip(drafters, parts, strict=True)]
        outputs = drafters[0].model.run([rows for rows, _ in planned])
        together = zip(drafters, parts, planned, outputs, strict=True)
        return [drafter.rank(len(part.nodes), own, output) for drafter, part, own, output in together]

    def follow(self, transition: Transition) -> None:
        """Kept nodes' slots join the prefix; those of dropped nodes become free."""
        num_computed, num_committed = self._num_computed, self.length
        super().follow(transition)
        if self.is_chain:
            return
        for node in transition.kept:
            path = self._paths.pop(node, None)
            if path is None:
                self._pending.append(node.position)
            else:
                self._append_to_prefix(path[-1:])
        self._pending += range(num_committed + len(transition.kept), self.length)
        left = set(transition.alive)
        for node in [node for node in self._paths if node not in left]:
            self._free.append(self._paths.pop(node)[-1])
        if num_joined := self._num_computed - num_computed:
            self._paths = {node: path[num_joined:] for node, path in self._paths.items()}

    def look_up(self) -> tuple[Sequence[int], float]:
        """What followed the longest suffix before; empty for a chain, which looks up with each step."""
        found = () if self._ngrams is None or self.is_chain else self._ngrams.continuation(LOOKUP_TOKENS)[0]
        return found, LOOKUP_WEIGHT if found else 0.0

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
        tokens = [self.committed[position] for position in positions]
        paths = [slots[: row + 1] for row in range(len(slots))]
        part = self._part(tokens, paths, behind)
        self._append_to_prefix(slots)  # behind what `part` has of it
        return part

    def _part(self, tokens: Sequence[int], paths: Sequence[Sequence[int]], behind: Sequence[Sequence[int]]) -> TreePart:
        wanted, mixtures = None, [self._ngrams.guesses(path) for path in behind] if self._ngrams is not None else ()
        if behind:
            self._ranking.see(self.committed)
            others = len(tokens) - len(behind)
            words = self._ranking.rows_behind(self.length, behind, mixtures, others)
            wanted = SamplerRows(self._ranking.sampler, words)
        slots = Paths(self._prefix[: self._num_computed], paths)
        return Rows(self._reduced(tokens), self._cache, wanted, paths=slots), mixtures

    def rank(self, number: int, part: TreePart, output: ModelOutput) -> Sequence[Guesses]:
        """Rank the tokens behind the last `number` rows by the logits of the pass."""
        rows, mixtures = part
        assert rows.wanted is not None
        try:
            output.check()
            outputs = None if output.outputs is None else output.outputs[-number:]
            return self._ranking.rank(output.logits[-number:], rows.wanted.inputs[-number:], mixtures, outputs)
        except NotFiniteError as error:
            self._undo(error)  # what was committed behind the prompt is lost, too: it costs guesses
            return [()] * number

    @property
    def _ranking(self) -> Ranking:
        assert isinstance(self.sampler, Ranking)
        return self.sampler

    def _new_sampler(self, state: SamplingState, number: int) -> SequenceSampler | None:
        if self.is_chain:
            return super()._new_sampler(state, number)
        least = 0.0 if self.fan_out == 1 else MIN_PROBABILITY  # a chain goes on however unlikely it is
        return Ranking(
            self.distribution, state, self.committed, number=self.fan_out, min_probability=least, sequence=number
        )

    def _append_to_prefix(self, slots: Sequence[int]) -> None:
        end = self._num_computed + len(slots)
        self._prefix[self._num_computed : end] = slots
        self._num_computed = end

    def _prepare(self) -> None:
        super()._prepare()
        self._prepare_rankers()

    def _prepare_rankers(self) -> None:
        self.model.prepare(self._cache, samplers_of(self.model, self._cache, DRAFT_LEVELS, RowRanker))
