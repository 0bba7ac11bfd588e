"""Tree drafters: the guesses after a node depend on its path alone, whatever happened before."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest
from models import tiny
from models.blocks import BUCKETED, UNLIKE, bucketed_model, random_ids
from passes import forward, prefilled
from protocol.sessions import nodes_of

from amusd.config import GREEDY, Distribution
from amusd.drafters.base import Expansion
from amusd.drafters.model import ModelDrafter
from amusd.drafters.ngram import NgramCache
from amusd.drafters.synthetic import ACCEPT_NEXT, SyntheticDrafter
from amusd.models.numerics import Numerics
from amusd.protocol.draft_session import DraftSession
from amusd.protocol.draft_tree import MAX_NODES, MIN_PROBABILITY, Guesses, Node
from amusd.protocol.messages import Open, Verdict
from amusd.runner.graphs import run_each_time
from amusd.runner.model_runner import ModelRunner
from amusd.sampling.ranking import Ranking
from amusd.sampling.sampler import SamplingState

ROWS = BUCKETED.width
PROMPT, MAX_LENGTH = 9, 120
PENALTIES = Distribution(
    temperature=0.7, top_k=40, repetition_penalty=1.4, presence_penalty=0.8, logit_bias=((5, 1.5),), seed=6
)
DISTRIBUTIONS = (GREEDY, Distribution(temperature=0.8, seed=5), PENALTIES)
REPLAYED = Numerics(width=ROWS, fixed=False, has_borders=False, prefill_chunk=32)
MODELS = {
    **{name: partial(bucketed_model, name) for name in UNLIKE},
    "replayed": lambda: tiny.wrapped_pair("LlamaConfig", REPLAYED, capture=run_each_time, tokens_per_step=4)[1],
}


def path_to(node: Node) -> list[int]:
    return [] if node.parent is None else [*path_to(node.parent), node.token_id]


class Checked:
    """A session with its drafter and the inputs of each pass; every answer is compared with that of a fresh pass."""

    def __init__(self, rng: random.Random, model: ModelRunner, distribution: Distribution) -> None:
        self.rng, self.model, self.distribution = rng, model, distribution
        self.prompt = random_ids(rng.randint(1, PROMPT), rng.randrange(2**32))
        ngrams = rng.choice([None, NgramCache(1)])
        self.mixed, self.fan_out = ngrams is not None, rng.randint(2, 4)
        shape = (rng.randint(2, 9), 1, (), distribution, self.fan_out, rng.randint(1, 2 * ROWS))
        self.session = DraftSession(Open(1, 1, tuple(self.prompt), MAX_LENGTH, "tree", *shape))
        self.drafter = ModelDrafter(model, ngrams)
        self.drafter.set_distribution(distribution)
        self.drafter.open(self.prompt, MAX_LENGTH, self.fan_out)
        self.session.tree.guess_path(*self.drafter.look_up())
        self.num_compared = 0
        self.check_slots()

    def compute(self) -> None:
        root, nodes = self.session.tree.root, nodes_of(self.session)
        if not nodes:
            return
        (found,) = self.drafter.step([self.drafter], [Expansion(root, nodes)])
        for node, guesses in zip(nodes, found, strict=True):
            self.compare(guesses, path_to(node))
            self.session.tree.grow([node], [guesses])
        self.check_slots()

    def commit(self, token_ids: Sequence[int]) -> None:
        room = MAX_LENGTH - self.session.base
        verdict = Verdict(1, 1, 0, self.session.base, tuple(token_ids[:room]))
        transition = self.session.receive(verdict)
        if transition is None:
            return
        self.drafter.follow(transition)
        assert self.drafter.length == self.session.base
        self.session.tree.guess_path(*self.drafter.look_up())
        self.check_slots()

    def some_path(self, length: int) -> list[int]:
        node, found = self.session.tree.root, []
        while node.children and len(found) < length:
            node = self.rng.choice(node.children)
            found.append(node.token_id)
        return found

    def verdict(self) -> None:
        foreseen = self.some_path(self.rng.randint(0, 4))
        others = self.rng.randint(0 if foreseen else 1, 2) * self.rng.choice([1, 1, 6])
        self.commit([*foreseen, *(self.rng.randrange(tiny.VOCAB) for _ in range(others))])

    def compare(self, guesses: Guesses, path: list[int]) -> None:
        """Compare with what a pass over the path alone gives, in a cache of its own."""
        text, mixture = [*self.session.committed, *path], ()
        if self.mixed:
            ngrams = NgramCache(1)
            ngrams.open(self.session.committed)
            mixture = ngrams.guesses(path)
        logits = forward(self.model, text[-1:], prefilled(self.model, text[:-1], len(text))).logits
        state = SamplingState(self.model.vocab_size, self.model.output_ids)
        options = {"number": self.fan_out, "min_probability": MIN_PROBABILITY}
        ranking = Ranking(self.distribution, state, self.prompt, **options)
        ranking.see(text)
        (expected,) = ranking.rank(logits, ranking.inputs_after(len(text), [()], [mixture]), [mixture])
        assert [token_id for token_id, _ in guesses] == [token_id for token_id, _ in expected]
        assert [weight for _, weight in guesses] == pytest.approx([weight for _, weight in expected], abs=1e-4)
        self.num_compared += 1

    def check_slots(self) -> None:
        """Each slot is free, holds a committed token, or holds a node: one of the three, and once."""
        slots = self.drafter.slots
        prefix = slots._prefix[: slots._num_computed].tolist()
        nodes = [path[-1] for path in slots._paths.values()]
        assert sorted([*prefix, *nodes, *slots._free]) == list(range(tiny.MAX_LENGTH + MAX_NODES))
        assert len(prefix) + len(slots._pending) == self.session.base
        computed = {node for node in self.session.tree.root.below() if node.computed}
        assert set(slots._paths) == computed


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("name", MODELS)
def test_guesses_depend_on_the_path_and_on_what_is_committed_alone(name: str, number: int) -> None:
    """Nodes in any slots, in one pass with their ancestors or not, whatever attention the model has."""
    rng = random.Random(f"{name} {number}")
    distribution = DISTRIBUTIONS[([*MODELS].index(name) + number) % 3]
    sequence = Checked(rng, MODELS[name](), distribution)
    for _ in range(12):
        for _ in range(rng.randint(0, 4)):
            sequence.compute()
        sequence.verdict()
    sequence.compute()
    assert sequence.num_compared > 5


# The drafter that is told the answer


VOCAB_SIZE = 60
LENGTH = 4000
REFERENCE = tuple((i * i + i // 7) % VOCAB_SIZE for i in range(LENGTH))


def ranks(accept: float, fan_out: int) -> list[int]:
    drafter = SyntheticDrafter(bucketed_model(), accept)
    drafter.set_reference(REFERENCE)
    drafter.open(REFERENCE[:5], LENGTH, fan_out)
    drafter.committed, found = [], []  # no model is asked
    for position in range(5, LENGTH):
        tokens = [token_id for token_id, _ in drafter.guesses(REFERENCE[:position])]
        assert len(set(tokens)) == len(tokens) == fan_out
        assert all(0 <= token_id < VOCAB_SIZE for token_id in tokens)
        right = REFERENCE[position]
        found.append(tokens.index(right) if right in tokens else fan_out)
    return found


@pytest.mark.parametrize("accept", [0.8, 0.0])
def test_the_right_token_has_each_rank_as_often_as_asked_for(accept: float) -> None:
    found = ranks(accept, 4)
    left = len(found)
    for rank, probability in enumerate((accept, ACCEPT_NEXT, ACCEPT_NEXT, ACCEPT_NEXT)):
        here = found.count(rank)
        assert here == pytest.approx(probability * left, abs=4.5 * (probability * (1 - probability) * left) ** 0.5)
        left -= here
    assert found == ranks(accept, 4)  # the text decides it, not the run
