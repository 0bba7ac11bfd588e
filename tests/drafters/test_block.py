"""Medusa's and DFlash's guesses are those of the papers' formulas, by their distance from the last token."""

from __future__ import annotations

import random
from collections.abc import Callable

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
from models.test_eagle import LAYERS, WIDTH, shared_weights
from torch import Tensor

from amusd.config import GREEDY, Distribution
from amusd.drafters.block import BlockDrafter
from amusd.models.block_models import BlockModel
from amusd.protocol.draft_session import MIN_PROBABILITY, Node
from amusd.protocol.messages import Features, Open, Verdict
from amusd.runtime.rollback import RollbackManager, propose
from amusd.sampling.ranking import Ranking
from amusd.sampling.sampler import SamplingState

CAPACITY, FAN_OUT = 100, 3
Score = Callable[[dict[int, Tensor], int, int], Tensor]
"""Features by position, the root's position and token -> [depths, columns]."""


class Pair:
    def __init__(
        self, model: BlockModel, score: Score, prompt: list[int], fan_out: int, distribution: Distribution
    ) -> None:
        self.score, self.distribution, self.fan_out = score, distribution, fan_out
        self.num_prompt = len(prompt)
        rows = 3 if fan_out > 1 else 1
        opening = Open(1, 1, tuple(prompt), CAPACITY, "block", 8, 1, (), distribution, fan_out, rows)
        self.drafter = BlockDrafter(model)
        self.manager = RollbackManager(opening, self.drafter)
        self.features = torch.randn(CAPACITY, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16().float()
        self.sent: set[int] = set()

    @property
    def committed(self) -> tuple[int, ...]:
        return self.manager.session.committed

    def send_features(self, start: int | None = None) -> None:
        start, end = len(self.sent) if start is None else start, len(self.committed) - 1
        if start < end:
            rows = self.features[start:end].bfloat16().view(torch.uint8).numpy().tobytes()
            self.manager.features.append(Features(1, 1, start, end, rows))
            assert self.manager.take_features() == 0
            self.sent |= set(range(start, end))

    def commit(self, *token_ids: int) -> None:
        self.manager.apply(Verdict(1, 1, 0, len(self.committed), token_ids, 0))
        self.send_features()

    def check(self) -> int:
        root = self.manager.session.root
        known = {position: self.features[position] for position in sorted(self.sent)}
        scores = self.score(known, root.position, root.token_id)
        ranking = Ranking(
            self.distribution,
            SamplingState(scores.shape[1]),
            self.committed[: self.num_prompt],
            number=self.fan_out,
            min_probability=MIN_PROBABILITY,
        )
        checked = 0
        nodes: list[tuple[Node, list[int]]] = [(root, [])]
        while nodes:
            node, path = nodes.pop()
            depth = len(path)
            if node.computed and depth < len(scores):
                ranking.see(self.committed)
                words = ranking.rows_behind(node.position + 1 - depth, [path])
                (row,) = ranking.rank(scores[depth : depth + 1], words)
                found = tuple(token_id for token_id, _ in row)
                expected = found[:1] if self.fan_out == 1 else found
                assert {child.token_id for child in node.children} <= set(expected)
                assert not node.children or max(node.children, key=lambda each: each.weight).token_id == expected[0]
                checked += len(node.children)
            elif node.computed:
                assert not node.children
            nodes += [(child, [*path, child.token_id]) for child in node.children]
        return checked


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[BlockModel, Score]]:
    target, folder = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafts")
    tiny.save_checkpoint(target, tiny.tiny_config(num_hidden_layers=LAYERS, tie_word_embeddings=False))
    heads, layers, shared = medusa_weights(), dflash_weights(), shared_weights(target)
    save_medusa(folder / "medusa", heads)
    save_dflash(folder / "dflash", layers)
    return {
        "medusa": (
            load_medusa(folder / "medusa", target),
            lambda features, position, _token_id: medusa_scores(heads, features[position - 1]),
        ),
        "dflash": (
            load_dflash(folder / "dflash", target),
            lambda features, position, token_id: dflash_scores(
                layers, shared, {place: row for place, row in features.items() if place < position}, position, token_id
            ),
        ),
    }


@pytest.fixture(params=["medusa", "dflash"])
def make(request: pytest.FixtureRequest, kinds: dict[str, tuple[BlockModel, Score]]) -> Callable[..., Pair]:
    model, score = kinds[request.param]

    def made(prompt: list[int], fan_out: int = FAN_OUT, distribution: Distribution = GREEDY) -> Pair:
        return Pair(model, score, prompt, fan_out, distribution)

    return made


DISTRIBUTIONS = {
    "greedy": GREEDY,
    "matching": Distribution(temperature=0.8, seed=3),
    "penalties": Distribution(repetition_penalty=1.7, frequency_penalty=0.5),
}


def tokens(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(3, tiny.VOCAB) for _ in range(number)]


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("fan_out", [1, FAN_OUT])
def test_guesses_are_those_of_the_formulas_after_any_verdict(
    make: Callable[..., Pair], fan_out: int, name: str
) -> None:
    rng = random.Random(5)
    pair = make(tokens(rng, 7), fan_out, DISTRIBUTIONS[name])
    assert not pair.manager.has_work, "it waits for the features of the prompt"
    pair.send_features()
    total = 0
    for _ in range(5):
        for _ in range(4):
            propose([pair.manager])
        total += pair.check()
        path, node = [], pair.manager.session.root
        while node.children and rng.random() < 0.6:
            node = rng.choice(node.children)
            path.append(node.token_id)
        others = [token for token in range(3, tiny.VOCAB) if node.child(token) is None]
        pair.commit(*path, rng.choice(others))  # behind a token that it has not foreseen all of the tree is new
        assert pair.manager.length == len(pair.committed)
    assert total > (10 if fan_out == 1 else 40)


def test_features_that_never_come_cost_guesses_and_no_more(make: Callable[..., Pair]) -> None:
    pair = make([5, 6, 7])
    pair.manager.apply(Verdict(1, 1, 0, 3, (9, 10), 0))
    assert pair.manager.has_work
    propose([pair.manager])
    assert not pair.manager.session.root.children
    pair.commit(11)
    propose([pair.manager])
    assert pair.check() > 0
