"""EAGLE, Medusa and DFlash drafters guess as the papers' formulas do, whatever was committed or came late.

EAGLE reads the target's states of committed tokens and its own states after them; Medusa and DFlash score by distance
from the root.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from models import tiny
from models.test_block_models import (
    dflash_scores,
    dflash_weights,
    load_dflash,
    load_medusa,
    medusa_scores,
    medusa_weights,
    save_dflash,
    save_medusa,
)
from models.test_eagle import LAYERS, OPTIONS, WIDTH, eagle3_logits, eagle3_weights, save_eagle3, shared_weights
from torch import Tensor

from amusd.checkpoints.draft_networks import load_published
from amusd.config import GREEDY, Distribution
from amusd.drafters.base import Drafter, path_to
from amusd.drafters.block import BlockDrafter
from amusd.drafters.eagle import EagleDrafter
from amusd.drafters.ngram import NgramCache
from amusd.errors import NotFiniteError
from amusd.models.passes import ModelOutput
from amusd.protocol.draft_tree import MIN_PROBABILITY, Node
from amusd.protocol.messages import Features, Open, Verdict
from amusd.runtime.draft_worker import draft_step
from amusd.runtime.rollback import RollbackManager
from amusd.sampling.ranking import Ranking
from amusd.sampling.sampler import SamplingState

CAPACITY = 100
RATIO = Distribution(temperature=100.0, seed=3, acceptance="rejection")
IDS = eagle3_weights()["d2t"] + torch.arange(12)
Guess = Callable[[list[int]], Sequence[int]]
"""Returns the tokens that may be guessed after a path below the root, the likeliest first."""
Score = Callable[[dict[int, Tensor], int, int], Tensor]
"""Features by position, the root's position and token -> [depths, columns]."""


class Pair:
    """A sequence whose drafter reads features, and the guesses that are expected of it."""

    def __init__(
        self,
        make: Callable[[], Drafter],
        formula: Callable[[Pair], Guess],
        rng: random.Random,
        *,
        fan_out: int = 1,
        distribution: Distribution = GREEDY,
    ) -> None:
        self.formula, self.fan_out, self.distribution, self.rng = formula, fan_out, distribution, rng
        self.prompt = tuple(rng.choices(range(3, tiny.VOCAB), k=rng.randrange(2, 20)))
        rows = 3 if fan_out > 1 else 1
        opening = Open(1, 1, self.prompt, CAPACITY, "test", 8, 1, (), distribution.as_message(), fan_out, rows)
        self.manager = RollbackManager(opening, make())
        self.manager.open()
        self.features = torch.randn(CAPACITY, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16().float()
        self.sent: set[int] = set()

    @property
    def committed(self) -> tuple[int, ...]:
        return self.manager.session.committed

    @property
    def root(self) -> Node:
        return self.manager.session.tree.root

    def known(self) -> dict[int, Tensor]:
        return {position: self.features[position] for position in sorted(self.sent)}

    def send_features(self, start: int | None = None, end: int | None = None) -> None:
        start, end = len(self.sent) if start is None else start, len(self.committed) - 1 if end is None else end
        if start < end:
            rows = self.features[start:end].bfloat16().view(torch.uint8).numpy().tobytes()
            self.manager.features.append(Features(1, 1, start, end, rows))
            self.manager.take_features()
            self.sent |= set(range(start, end))

    def propose(self, number: int) -> None:
        for _ in range(number):
            draft_step([self.manager])

    def commit(self, *token_ids: int) -> None:
        self.manager.apply(Verdict(1, 1, 0, len(self.committed), token_ids))

    def some_path(self) -> list[Node]:
        path = [self.root]
        while path[-1].children and self.rng.random() < 0.6:
            path.append(self.rng.choice(path[-1].children))
        return path

    def commit_unforeseen(self, path: Sequence[Node]) -> None:
        """Tokens of the path and one that is not in the tree, so that all of the tree is new."""
        others = [token for token in range(3, tiny.VOCAB) if path[-1].child(token) is None]
        self.commit(*(node.token_id for node in path[1:]), self.rng.choice(others))

    def check(self) -> int:
        guess, checked = self.formula(self), 0
        paths: list[tuple[Node, list[int]]] = [(self.root, [])]
        while paths:
            node, path = paths.pop()
            if node.computed:
                expected = guess(path)
                assert {child.token_id for child in node.children} <= set(expected)
                for likeliest in sorted(node.children, key=lambda child: -child.weight)[:1]:
                    assert likeliest.token_id == expected[0], path
                checked += len(node.children)
            paths += [(child, [*path, child.token_id]) for child in node.children]
        return checked


Make = Callable[..., Pair]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Make]:
    target, folder = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafts")
    tiny.save_checkpoint(target, tiny.tiny_config(num_hidden_layers=LAYERS, tie_word_embeddings=False))
    shared = shared_weights(target)
    eagle = load_published(save_eagle3(folder / "eagle"), target, OPTIONS, "eagle")

    def eagle_formula(pair: Pair) -> Guess:
        features = torch.stack([*pair.known().values()])

        def guess(path: list[int]) -> list[int]:
            tokens = [*pair.committed, *path]
            logits = eagle3_logits(eagle3_weights(), shared["model.embed_tokens.weight"], features, tokens)
            return IDS[logits[-1].argsort(descending=True)].tolist()

        return guess

    def medusa(features: dict[int, Tensor], position: int, _token_id: int) -> Tensor:
        return medusa_scores(medusa_weights(), features[position - 1])

    def dflash(features: dict[int, Tensor], position: int, token_id: int) -> Tensor:
        seen = {place: row for place, row in features.items() if place < position}
        return dflash_scores(dflash_weights(), shared, seen, position, token_id)

    def block_formula(score: Score) -> Callable[[Pair], Guess]:
        def formula(pair: Pair) -> Guess:
            root = pair.root
            scores = score(pair.known(), root.position, root.token_id)
            options = {"number": pair.fan_out, "min_probability": MIN_PROBABILITY}
            ranking = Ranking(pair.distribution, SamplingState(scores.shape[1]), pair.prompt, **options)
            ranking.see(pair.committed)

            def guess(path: list[int]) -> list[int]:
                packed = ranking.inputs_after(root.position + 1, [path])
                rows = ranking.rank(scores[len(path) : len(path) + 1], packed) if len(path) < len(scores) else [()]
                return [token_id for token_id, _ in rows[0]]

            return guess

        return formula

    heads = load_medusa(save_medusa(folder / "medusa", medusa_weights()), target)
    blocks = load_dflash(save_dflash(folder / "dflash"), target)
    return {
        "eagle": partial(Pair, lambda: EagleDrafter(eagle), eagle_formula),
        "eagle with lookup": partial(Pair, lambda: EagleDrafter(eagle, NgramCache(4)), eagle_formula),
        "medusa": partial(Pair, lambda: BlockDrafter(heads), block_formula(medusa)),
        "dflash": partial(Pair, lambda: BlockDrafter(blocks), block_formula(dflash)),
    }


@pytest.mark.parametrize("seed", range(6))
def test_eagles_new_tree_is_that_of_a_fresh_drafter_whatever_was_committed(pairs: dict[str, Make], seed: int) -> None:
    """Verdicts that the tree foresaw, in part or not at all; features in time, late, twice."""
    rng = random.Random(seed)
    pair = pairs["eagle"](rng, fan_out=rng.choice([1, 3]))
    assert not pair.manager.has_work, "it waits for the features of the prompt"
    pair.send_features()
    for _ in range(6):
        pair.propose(rng.randrange(4))
        path = [node.token_id for node in pair.some_path()[1:]]
        pair.commit(*path, rng.randrange(3, tiny.VOCAB))
        if rng.random() < 0.5:
            pair.send_features()
        if rng.random() < 0.3:
            pair.send_features(start=rng.randrange(len(pair.sent)))
    pair.commit_unforeseen([pair.root])
    pair.send_features()
    pair.propose(3)
    assert pair.check() >= 3


@pytest.mark.parametrize("num_known", [0, 5, 15])
def test_eagle_goes_on_with_the_features_of_a_sequence_that_began_alike(pairs: dict[str, Make], num_known: int) -> None:
    rng = random.Random(num_known)
    pair = pairs["eagle"](rng, fan_out=3)
    pair.commit(*rng.choices(range(3, tiny.VOCAB), k=15))
    pair.send_features(0, num_known)
    pair.propose(1)
    drafter, num_shared = pair.manager.drafter, 12
    pair.manager.close()
    prompt = (*pair.committed[:num_shared], *rng.choices(range(3, tiny.VOCAB), k=6))
    opening = Open(2, 1, prompt, CAPACITY, "test", 8, 1, fan_out=3, rows_per_step=3)
    pair.manager = RollbackManager(opening, drafter)
    pair.manager.open()
    num_kept = min(num_known, num_shared)
    pair.sent = set(range(num_kept))
    assert not pair.manager.has_work
    assert len(drafter.slots._pending) == len(prompt) - max(1, num_kept)
    pair.send_features()
    pair.propose(3)
    assert pair.check() >= 3


def test_a_token_after_kept_ones_starts_from_their_own_states_where_features_are_lost(pairs: dict[str, Make]) -> None:
    pair = pairs["eagle"](random.Random(3))
    pair.send_features()
    pair.propose(3)
    first = pair.root.children[0]
    second = first.children[0]
    assert second.computed
    pair.commit_unforeseen([pair.root, first, second])
    pair.propose(1)
    assert pair.check() == 1


def test_under_the_ratio_test_eagle_is_certain_of_the_likeliest(pairs: dict[str, Make]) -> None:
    pair = pairs["eagle"](random.Random(4), distribution=RATIO)
    pair.send_features()
    pair.propose(4)
    assert pair.check() >= 4


def test_under_the_ratio_test_each_offered_token_has_what_it_was_drawn_from(pairs: dict[str, Make]) -> None:
    """Also where the text repeats itself, which a chain of EAGLE looks up."""
    pair = pairs["eagle with lookup"](random.Random(4), distribution=RATIO)
    pair.commit(*range(5, 15), *range(5, 10))
    pair.send_features()
    pair.propose(2)
    candidate = pair.manager.session.offer()
    assert candidate is not None
    assert len(candidate.draft_probs) == len(candidate.token_ids) > 0


def test_a_chain_of_eagle_whose_logits_are_not_finite_proposes_nothing(
    pairs: dict[str, Make], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelOutput, "check", Mock(side_effect=NotFiniteError("the largest logit is nan")))
    for distribution in (GREEDY, RATIO):
        pair = pairs["eagle"](random.Random(4), distribution=distribution)
        pair.send_features()
        pair.propose(1)
        assert not pair.root.children


DISTRIBUTIONS = {
    "greedy": GREEDY,
    "matching": Distribution(temperature=0.8, seed=3),
    "penalties": Distribution(repetition_penalty=1.7, frequency_penalty=0.5),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("fan_out", [1, 3])
@pytest.mark.parametrize("kind", ["medusa", "dflash"])
def test_guesses_of_a_block_are_those_of_the_formulas_after_any_verdict(
    pairs: dict[str, Make], kind: str, fan_out: int, name: str
) -> None:
    pair = pairs[kind](random.Random(5), fan_out=fan_out, distribution=DISTRIBUTIONS[name])
    assert not pair.manager.has_work, "it waits for the features of the prompt"
    pair.send_features()
    total = 0
    for _ in range(5):
        pair.propose(4)
        total += pair.check()
        pair.commit_unforeseen(pair.some_path())
        pair.send_features()
        assert pair.manager.length == len(pair.committed)
    assert total > (10 if fan_out == 1 else 25)


@pytest.mark.parametrize("fan_out", [1, 3])
@pytest.mark.parametrize("kind", ["medusa", "dflash"])
def test_a_block_is_scored_again_after_a_root_that_was_computed(
    pairs: dict[str, Make], kind: str, fan_out: int
) -> None:
    for seed in range(5):
        pair = pairs[kind](random.Random(seed), fan_out=fan_out)
        pair.send_features()
        pair.propose(1 if fan_out == 1 else 2)
        foreseen = next(child for child in pair.root.children if child.computed)
        before = {node for node in foreseen.below() if node.computed}
        pair.commit(foreseen.token_id)
        assert pair.root is foreseen
        pair.send_features()
        pair.propose(1)
        guess = pair.formula(pair)
        new = [node for node in foreseen.below() if node.computed and node.children and node not in before]
        assert new
        for node in new:
            likeliest = max(node.children, key=lambda child: child.weight)
            assert likeliest.token_id == guess(path_to(foreseen, node))[0]


@pytest.mark.parametrize("kind", ["medusa", "dflash"])
def test_features_that_never_come_cost_guesses_and_no_more(pairs: dict[str, Make], kind: str) -> None:
    pair = pairs[kind](random.Random(6), fan_out=3)
    pair.commit(9, 10)
    assert pair.manager.has_work
    pair.propose(1)
    assert not pair.root.children
    pair.commit(11)
    pair.send_features()
    pair.propose(1)
    assert pair.check() > 0
