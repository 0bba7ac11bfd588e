"""An EAGLE drafter guesses what the papers' formulas give: true states of committed tokens, its own behind them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import tiny
from models.test_eagle import OPTIONS, WIDTH, Weights, eagle3_logits, eagle3_weights, save_eagle3
from safetensors.torch import load_file
from torch import Tensor

from amusd.config import GREEDY, Distribution
from amusd.drafters.eagle import EagleDrafter
from amusd.models.cached_model import CachedModel
from amusd.models.eagle import load_eagle
from amusd.protocol.draft_session import Node
from amusd.protocol.messages import Features, Open, Verdict
from amusd.runtime.rollback import RollbackManager, propose

CAPACITY = 100
IDS = eagle3_weights()["d2t"] + torch.arange(12)


class Pair:
    def __init__(
        self,
        model: CachedModel,
        embedding: Tensor,
        prompt: list[int],
        fan_out: int = 2,
        distribution: Distribution = GREEDY,
    ) -> None:
        self.weights: Weights = eagle3_weights()
        self.embedding = embedding
        rows = 3 if fan_out > 1 else 1
        opening = Open(1, 1, tuple(prompt), CAPACITY, "eagle", 8, 1, (), distribution, fan_out, rows)
        self.drafter = EagleDrafter(model)
        self.manager = RollbackManager(opening, self.drafter)
        self.num_sent = 0
        generator = torch.Generator().manual_seed(len(prompt))
        self.features = torch.randn(CAPACITY, WIDTH, generator=generator).bfloat16().float()

    @property
    def committed(self) -> tuple[int, ...]:
        return self.manager.session.committed

    def send_features(self, start: int | None = None, end: int | None = None) -> None:
        start, end = self.num_sent if start is None else start, len(self.committed) - 1 if end is None else end
        if start < end:
            rows = self.features[start:end].bfloat16().view(torch.uint8).numpy().tobytes()
            self.manager.features.append(Features(1, 1, start, end, rows))
            assert self.manager.take_features() == 0
            self.num_sent = max(self.num_sent, end)

    def commit(self, *token_ids: int, send: bool = True) -> None:
        self.manager.apply(Verdict(1, 1, 0, len(self.committed), token_ids, 0))
        if send:
            self.send_features()

    def expected(self, path: list[int], known: int | None = None) -> int:
        tokens = [*self.committed, *path]
        features = self.features[: len(self.committed) - 1 if known is None else known]
        logits = eagle3_logits(self.weights, self.embedding, features, tokens)
        return int(IDS[logits[-1].argmax()])

    def check(self) -> int:
        checked = 0
        paths: list[tuple[Node, list[int]]] = [(self.manager.session.root, [])]
        while paths:
            node, path = paths.pop()
            if node.computed and node.children:
                likeliest = max(node.children, key=lambda child: child.weight)
                assert likeliest.token_id == self.expected(path), path
                checked += 1
            paths += [(child, [*path, child.token_id]) for child in node.children]
        return checked


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    target = tmp_path_factory.mktemp("target")
    tiny.save_checkpoint(target, tiny.tiny_config(num_hidden_layers=6, tie_word_embeddings=False))
    draft: Path = save_eagle3(tmp_path_factory.mktemp("draft") / "eagle3")
    model = load_eagle(draft, target, OPTIONS)
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    return lambda *arguments, **options: Pair(model, embedding, *arguments, **options)


def random_tokens(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(3, tiny.VOCAB) for _ in range(number)]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_was_committed_a_new_tree_is_that_of_a_fresh_drafter(make: Callable[..., Pair], seed: int) -> None:
    """Verdicts that the tree foresaw, in part or not at all; features in time, late, twice."""
    rng = random.Random(seed)
    pair = make(random_tokens(rng, rng.randrange(2, 20)), fan_out=rng.choice([1, 3]))
    assert not pair.manager.has_work, "it waits for the features of the prompt"
    pair.send_features()
    for _ in range(6):
        for _ in range(rng.randrange(4)):
            propose([pair.manager])
        path, node = [], pair.manager.session.root
        while node.children and rng.random() < 0.6:
            node = rng.choice(node.children)
            path.append(node.token_id)
        pair.commit(*path, rng.randrange(3, tiny.VOCAB), send=rng.random() < 0.5)
        if rng.random() < 0.3:
            pair.send_features(start=rng.randrange(pair.num_sent) if pair.num_sent else 0)
    others = [token for token in range(3, tiny.VOCAB) if pair.manager.session.root.child(token) is None]
    pair.commit(rng.choice(others))  # nobody has foreseen it: all of the tree is new
    pair.send_features()
    for _ in range(3):
        propose([pair.manager])
    assert pair.check() >= 3


@pytest.mark.parametrize("num_known", [0, 5, 15])
def test_a_sequence_that_begins_like_the_one_before_goes_on_with_its_features(
    make: Callable[..., Pair], num_known: int
) -> None:
    rng = random.Random(num_known)
    pair = make(random_tokens(rng, 15), fan_out=3)
    pair.send_features(0, num_known)
    pair.commit(*random_tokens(rng, 1), send=False)
    propose([pair.manager])
    pair.manager.close()
    prompt = (*pair.committed[:12], *random_tokens(rng, 6))
    pair.manager = RollbackManager(
        Open(2, 1, prompt, CAPACITY, "eagle", 8, 1, fan_out=3, rows_per_step=3), pair.drafter
    )
    assert not pair.manager.has_work
    num_kept = min(num_known, 12)
    assert len(pair.drafter._pending) == len(prompt) - max(1, num_kept)
    pair.send_features(num_kept)
    for _ in range(3):
        propose([pair.manager])
    assert pair.check() >= 3


def test_a_token_behind_kept_ones_starts_from_their_own_states_where_features_are_lost(
    make: Callable[..., Pair],
) -> None:
    pair = make(random_tokens(random.Random(3), 6), fan_out=1)
    pair.send_features()
    for _ in range(3):
        propose([pair.manager])
    first = pair.manager.session.root.children[0]
    second = first.children[0]
    assert second.computed
    other = next(token for token in range(3, tiny.VOCAB) if second.child(token) is None)
    pair.commit(first.token_id, second.token_id, other, send=False)
    propose([pair.manager])
    assert pair.manager.session.root.children[0].token_id == pair.expected([], pair.num_sent)


def test_under_the_ratio_test_it_is_certain_of_the_likeliest(make: Callable[..., Pair]) -> None:
    hot = Distribution(temperature=100.0, seed=3, acceptance="rejection")
    pair = make(random_tokens(random.Random(4), 6), 1, hot)
    pair.send_features()
    for _ in range(4):
        propose([pair.manager])
    assert pair.check() >= 4
