"""Passes over nodes of a tree: each node's logits are those of its path alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import tiny
from models.blocks import check_logits, random_ids, stock_logits
from models.paths import decoded_both_ways, tree_rows
from passes import forward
from torch import Tensor

from amusd.models.kv_cache import KVCache
from amusd.models.numerics import Numerics
from amusd.runner.graphs import run_each_time
from amusd.runner.model_runner import ModelRunner

WIDTH, PROMPT, SPARE = 8, 11, 24
NUM_SLOTS = PROMPT + SPARE
NUMERICS = Numerics(width=WIDTH, fixed=False, prefill_chunk=32)
STOCK, MODEL = tiny.wrapped_pair("LlamaConfig", NUMERICS)
_, REPLAYED = tiny.wrapped_pair(
    "LlamaConfig", Numerics(width=WIDTH, fixed=False, has_borders=False, prefill_chunk=32), capture=run_each_time
)
UNLIKE = ["LlamaConfig", "Gemma2Config", "GPT2Config", "GptOssConfig", "DeepseekV3Config", "Llama4TextConfig"]


@dataclass
class Node:
    token_id: int
    parent: Node | None
    slot: int = -1  # until it is computed

    @property
    def path(self) -> list[Node]:
        return [*([] if self.parent is None else self.parent.path), self]


@dataclass
class Tree:
    model: ModelRunner
    prompt: list[int]
    cache: KVCache = field(init=False)
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.cache = self.model.new_cache(len(self.prompt), spare=SPARE)
        self.model.prefill(self.prompt, self.cache)
        self.free = list(range(len(self.prompt), NUM_SLOTS))

    def compute(self, nodes: Sequence[Node]) -> Tensor:
        for node in nodes:
            node.slot = self.free.pop()
        paths = [[ancestor.slot for ancestor in node.path] for node in nodes]
        token_ids, prefix = [node.token_id for node in nodes], np.arange(len(self.prompt))
        return self.model.run([tree_rows(token_ids, prefix, paths, self.cache)])[0].logits.clone()

    def expected(self, stock: Any, nodes: Sequence[Node]) -> Tensor:
        paths = [[*self.prompt, *(ancestor.token_id for ancestor in node.path)] for node in nodes]
        return torch.stack([stock_logits(stock, path)[-1] for path in paths])


def grow(rng: random.Random, nodes: list[Node], number: int) -> None:
    for _ in range(number):
        nodes.append(Node(rng.randrange(tiny.VOCAB), rng.choice([None, *nodes])))


def check(tree: Tree, stock: Any, nodes: Sequence[Node]) -> None:
    check_logits(tree.compute(nodes), tree.expected(stock, nodes), tolerance=1e-3)


@pytest.mark.parametrize("model", [MODEL, REPLAYED], ids=["computed anew", "replayed"])
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_node_in_any_slot_of_any_batch_gets_the_logits_of_its_path(model: ModelRunner, seed: int) -> None:
    """Nodes are computed in random batches, some in one with their ancestors; subtrees end, and their slots go on."""
    rng = random.Random(seed)
    tree = Tree(model, random_ids(PROMPT, seed))
    rng.shuffle(tree.free)
    nodes: list[Node] = []
    for _ in range(6):
        grow(rng, nodes, rng.randint(1, 5))
        waiting = [node for node in nodes if node.slot < 0]  # ancestors stand before their descendants
        batch = waiting[: min(rng.randint(1, WIDTH), len(tree.free))]
        rng.shuffle(batch)
        if batch:
            check(tree, STOCK, batch)
        ended = rng.choice(nodes)
        for node in [node for node in nodes if ended in node.path]:
            nodes.remove(node)
            if node.slot >= 0:
                tree.free.append(node.slot)
        rng.shuffle(tree.free)
    assert tree.cache.length == PROMPT


@pytest.mark.parametrize("name", UNLIKE)
def test_architectures_of_transformers_compute_trees(name: str) -> None:
    stock, model = tiny.wrapped_pair(name, NUMERICS, model_impl="transformers")
    tree, rng = Tree(model, random_ids(PROMPT)), random.Random(name)
    rng.shuffle(tree.free)
    nodes: list[Node] = []
    grow(rng, nodes, WIDTH)
    check(tree, stock, nodes)
    grow(rng, nodes, WIDTH)
    check(tree, stock, nodes[WIDTH:])


# Several paths behind one token

FIXED = Numerics(width=8, fixed=True, prefill_chunk=64, num_tracks=3)
EXPERTS = {"GptOssConfig", "DeepseekV3Config"}


@pytest.mark.parametrize("name", UNLIKE)
def test_each_row_of_several_paths_has_the_logits_of_its_path_alone(name: str) -> None:
    _, model = tiny.wrapped_pair(name, FIXED)
    expected, found = decoded_both_ways(model, 80)
    if name not in EXPERTS:
        assert torch.equal(found, expected)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("replayed", [False, True], ids=["computed anew", "replayed"])
def test_several_paths_behind_wider_ones_have_the_logits_of_stock(replayed: bool) -> None:
    """And rows of a pass can be kept right behind it alone, whatever kind of pass came in between."""
    rule = Numerics(width=8, fixed=False, has_borders=False, prefill_chunk=32, num_tracks=3) if replayed else FIXED
    _, model = tiny.wrapped_pair("LlamaConfig", rule, capture=run_each_time if replayed else None)
    prompt = random_ids(10)
    cache = model.new_cache(60, spare=8)
    model.prefill(prompt, cache)
    for parents in ([0, 0, 0, 1, 2, 3, 4], [0, 1, 2, 2], [0, 0], [0]):
        tokens, paths = random_ids(len(parents) + 1, seed=len(parents)), [[0]]
        for row, parent in enumerate(parents, start=1):
            paths.append([*paths[parent], row])
        expected = [stock_logits(STOCK, prompt + [tokens[row] for row in path])[-1] for path in paths]
        logits = forward(model, tokens, cache, parents=parents).logits
        torch.testing.assert_close(logits, torch.stack(expected), atol=1e-3, rtol=1e-3)

    def tree_pass() -> None:
        model.run([tree_rows([5], np.arange(10), [[40]], cache)])

    for other in (lambda: forward(model, [5], cache).choose(), lambda: model.prefill([5], cache), tree_pass):
        forward(model, [5, 6, 7], cache, parents=[0, 0])
        other()
        length = cache.length
        with pytest.raises(ValueError, match="not one over paths"):
            model.keep([0, 2], cache)
        assert cache.length == length
        cache.truncate(10)
