"""The workers' calls of their models, for candidates and verdicts that a test makes up."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from amusd.config import GREEDY, Distribution
from amusd.drafters.base import Expansion
from amusd.drafters.model import ModelDrafter
from amusd.policies.schedules import AutoregressivePolicy
from amusd.protocol.draft_tree import Node, Transition
from amusd.protocol.messages import CERTAINTY, Candidate
from amusd.protocol.prefix_hash import EMPTY, extend
from amusd.protocol.target_session import TargetSession
from amusd.runner.model_runner import ModelRunner
from amusd.runtime.verifier import Request, Verifier, prepare_to_verify
from amusd.sampling.acceptance import Acceptance, certain, unpack_draft_probs


class Target:
    def __init__(self, model: ModelRunner) -> None:
        self._model = model
        self._cache = model.new_cache(model.max_length)
        prepare_to_verify(model, self._cache)

    def open(self, prompt: Sequence[int], distribution: Distribution = GREEDY, **scored: Any) -> None:
        self.tokens = tuple(prompt)
        self._distribution = distribution
        request = Request(
            prompt=self.tokens,
            max_length=self._model.max_length,
            policy=AutoregressivePolicy(),
            drafter=None,
            distribution=distribution,
            **scored,
        )
        self.verifier = Verifier(self._model, request, self._cache)
        self._cache.truncate(0)
        self._model.prefill(prompt[:-1], self._cache)

    def verify(self, candidates: Sequence[int], alternatives: Sequence[int] = ()) -> Acceptance:
        """One pass; `alternatives` to the first candidate make it one over several paths, where that is possible."""
        session = self._session(tuple(candidates), tuple(alternatives))
        limit = min(session.remaining, self._model.numerics.max_rows(len(self.tokens) - 1)) - 1
        breadth = 3 if alternatives else 1
        block = self.verifier.begin(session, min(len(candidates), limit), breadth)
        [output] = self._model.run([self.verifier.rows(block)])
        acceptance = self.verifier.judge(session, block, output)
        session.commit(acceptance.token_ids, acceptance.num_accepted)
        self.tokens = session.committed
        self._cache.truncate(min(self._cache.length, len(self.tokens) - 1))
        return acceptance

    def _session(self, candidates: tuple[int, ...], alternatives: tuple[int, ...]) -> TargetSession:
        length, tokens = len(self.tokens), (*candidates, *alternatives)
        wants_draft_probs = self._distribution.rule == "rejection"
        session = TargetSession(
            sequence_id=1,
            prompt=self.tokens,
            max_length=self._model.max_length,
            vocab_size=self._model.vocab_size,
            fan_out=1 + len(alternatives),
            wants_draft_probs=wants_draft_probs,
        )
        session.attach(1)
        weights = (CERTAINTY * 3 // 4,) * len(candidates) + (CERTAINTY // 8,) * len(alternatives)
        rows = tuple(certain(token) for token in tokens) if wants_draft_probs else ()
        message = Candidate(
            sequence_id=1,
            incarnation=1,
            base=length,
            prefix_hash=reduce(extend, self.tokens, EMPTY),
            first=1,
            parents=(*range(len(candidates)), *(0 for _ in alternatives)),
            token_ids=tokens,
            weights=weights if alternatives else (),
            more=True,
            draft_probs=rows,
        )
        session.receive(message, unpack_draft_probs(rows, tokens, self._model.vocab_size) if wants_draft_probs else ())
        return session


class TreeDraft:
    def __init__(self, model: ModelRunner) -> None:
        self._drafter = ModelDrafter(model)

    def open(self, prompt: Sequence[int], capacity: int, distribution: Distribution = GREEDY) -> None:
        self._drafter.set_distribution(distribution)
        self._drafter.open(prompt, capacity, 4)
        self._start(prompt[-1])

    def step(self, num_nodes: int) -> list[Node]:
        parents = [self._leaves[number % len(self._leaves)] for number in range(num_nodes)]
        nodes = [Node(parent, 10 + number, parent.position + 1, 0.1, 0.1) for number, parent in enumerate(parents)]
        self._drafter.step([self._drafter], [Expansion(self._root, nodes)])
        self._leaves = nodes
        return nodes

    def adopt(self, kept: Sequence[Node], token_ids: Sequence[int]) -> None:
        self._drafter.follow(Transition(tuple(kept), tuple(token_ids), (), 0))
        self._start(token_ids[-1])

    def _start(self, last_token: int) -> None:
        self._root = Node(None, last_token, self._drafter.length - 1, 1.0, 1.0)
        self._leaves = [self._root]
        self._drafter.step([self._drafter], [Expansion(self._root, [self._root])])
