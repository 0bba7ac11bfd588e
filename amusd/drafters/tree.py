"""A tree in a model's cache: several nodes are computed in a step, and each gives a few ranked guesses.

slots     of keys and values: [0, prompt - 1) the prompt, above that one for each computed node
prefix    the slots of committed tokens, in order; a confirmed node's slot is added, nothing is moved
pending   committed tokens that are not computed; the root is the last of them, unless computed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from amusd.config import Distribution
from amusd.drafters.base import Expansion, path_to, say_not_finite
from amusd.drafters.chain import model_ids
from amusd.drafters.ngram import LOOKUP_TOKENS, NgramCache
from amusd.errors import NotFiniteError
from amusd.models.kv_cache import KVCache
from amusd.models.passes import ModelOutput, Paths, Rows, SamplerRows
from amusd.protocol.draft_tree import MAX_NODES, MIN_PROBABILITY, Guesses, Node, Transition
from amusd.runner.model_runner import ModelRunner
from amusd.sampling.ranking import Ranking, RowRanker
from amusd.sampling.sampler import DRAFT_LEVELS

LOOKUP_WEIGHT = 0.85
"""Probability that a looked-up token is right (`experiments/embedded_draft/README.md`)."""


class TreeSlots:
    """The slots of one sequence's tree in `cache`; `ngrams` are mixed with the guesses and add repetitions."""

    def __init__(self, model: ModelRunner, cache: KVCache, ngrams: NgramCache | None = None) -> None:
        self._model, self._cache, self._ngrams = model, cache, ngrams
        self._num_slots = model.max_length + MAX_NODES
        self._prefix = np.arange(self._num_slots)  # only the first `_num_computed` count
        self._num_computed = 0
        state, _ = model.sampling_state(cache)
        model.prepare(cache, [RowRanker(state, level) for level in DRAFT_LEVELS])

    def open(self, committed: list[int], distribution: Distribution, fan_out: int) -> None:
        """Start from `committed`, to which the drafter appends: all but its last token are in the cache."""
        least = 0.0 if fan_out == 1 else MIN_PROBABILITY  # a chain goes on however unlikely it is
        state, number = self._model.sampling_state(self._cache)
        self._ranking = Ranking(distribution, state, committed, number=fan_out, min_probability=least, sequence=number)
        self._committed = committed
        if self._ngrams is not None:
            self._ngrams.open(committed)
        self._paths: dict[Node, tuple[int, ...]] = {}
        self._prefix = np.arange(self._num_slots)
        self._num_computed = len(committed) - 1
        self._free = list(range(self._num_slots - 1, self._num_computed - 1, -1))  # the lowest is taken first
        self._pending = [self._num_computed]  # positions

    def follow(self, transition: Transition) -> None:
        """Take in a committed verdict: slots of kept nodes join the prefix; slots of dropped nodes are freed."""
        num_computed, end = self._num_computed, len(self._committed)
        for node in transition.kept:
            path = self._paths.pop(node, None)
            if path is None:
                self._pending.append(node.position)
            else:
                self._append_to_prefix(path[-1:])
        self._pending += range(end - len(transition.token_ids), end)
        left = set(transition.alive)
        for node in [node for node in self._paths if node not in left]:
            self._free.append(self._paths.pop(node)[-1])
        if num_joined := self._num_computed - num_computed:
            self._paths = {node: path[num_joined:] for node, path in self._paths.items()}

    def look_up(self) -> tuple[Sequence[int], float]:
        """See `Drafter`."""
        found = () if self._ngrams is None else self._ngrams.continuation(LOOKUP_TOKENS)[0]
        return found, LOOKUP_WEIGHT if found else 0.0

    def rows(self, part: Expansion) -> Rows:
        """Rows of `part`; for a root, those of missing committed tokens. Other missing tokens are computed first."""
        root, nodes = part.root, part.nodes
        most = self._model.numerics.max_rows(0)
        while len(self._pending) > (most if nodes[0] is root else 0):
            self._model.run([self._pending_rows(most, ())])
        if nodes[0] is root:
            return self._pending_rows(most, ([],))
        for node in nodes:
            above = () if node.parent is None or node.parent is root else self._paths[node.parent]
            self._paths[node] = (*above, self._free.pop())
        tokens, paths = [node.token_id for node in nodes], [self._paths[node] for node in nodes]
        return self._rows(tokens, paths, [path_to(root, node) for node in nodes])

    def take(self, output: ModelOutput) -> Sequence[Guesses]:
        """The likeliest tokens after the nodes of the last `rows`; none if not finite."""
        assert output.wanted is not None
        number = len(self._mixtures)
        try:
            output.check()
            outputs = None if output.outputs is None else output.outputs[-number:]
            inputs = output.wanted.inputs[-number:]
            return self._ranking.rank(output.logits[-number:], inputs, self._mixtures, outputs)
        except NotFiniteError as error:
            say_not_finite(error)
            self._model.wipe(self._cache)  # the committed tokens after the prompt are lost, too, which costs guesses
            return [()] * number

    def _pending_rows(self, most: int, behind: Sequence[Sequence[int]]) -> Rows:
        """Rows of the next missing tokens."""
        positions = self._pending[:most]
        del self._pending[:most]
        slots = [self._free.pop() for _ in positions]
        tokens = [self._committed[position] for position in positions]
        rows = self._rows(tokens, [slots[: row + 1] for row in range(len(slots))], behind)
        self._append_to_prefix(slots)  # now: the prefix in `rows` ends before these
        return rows

    def _rows(self, tokens: Sequence[int], paths: Sequence[Sequence[int]], behind: Sequence[Sequence[int]]) -> Rows:
        """Rows of `tokens`; the last ones are ranked, each after the committed tokens and its path of `behind`."""
        wanted = None
        self._mixtures = [() if self._ngrams is None else self._ngrams.guesses(path) for path in behind]
        if behind:
            self._ranking.see(self._committed)
            others = len(tokens) - len(behind)
            inputs = self._ranking.inputs_after(len(self._committed), behind, self._mixtures, others)
            wanted = SamplerRows(self._ranking.sampler, inputs)
        slots = Paths(self._prefix[: self._num_computed], paths)
        return Rows(model_ids(self._model, tokens), self._cache, wanted, paths=slots)

    def _append_to_prefix(self, slots: Sequence[int]) -> None:
        end = self._num_computed + len(slots)
        self._prefix[self._num_computed : end] = slots
        self._num_computed = end


def tree_step(model: ModelRunner, trees: Sequence[TreeSlots], parts: Sequence[Expansion]) -> list[Sequence[Guesses]]:
    """Guesses after each node, from as few passes over all trees as possible."""
    found: list[Sequence[Guesses]] = [()] * len(trees)
    most = model.numerics.width
    for start in range(0, max(len(part.nodes) for part in parts), most):
        cut = {index: part.nodes[start : start + most] for index, part in enumerate(parts) if start < len(part.nodes)}
        outputs = model.run([trees[index].rows(replace(parts[index], nodes=nodes)) for index, nodes in cut.items()])
        for index, output in zip(cut, outputs, strict=True):
            found[index] = [*found[index], *trees[index].take(output)]
    return found
