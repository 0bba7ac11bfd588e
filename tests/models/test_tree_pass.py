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
from models.blocks import random_ids, stock_logits
from models.paths import decoded_both_ways, tree_rows
from torch import Tensor

from amusd.models.attention import register_attention
from amusd.models.cached_model import CachedModel
from amusd.models.graphs import run_each_time
from amusd.models.huggingface import wrap_model
from amusd.models.kv_cache import PreallocatedCache
from amusd.models.load_options import LoadOptions
from amusd.models.numerics import Numerics
from amusd.models.passes import lay_out_paths

WIDTH, PROMPT, SPARE = 8, 11, 24
NUM_SLOTS = PROMPT + SPARE
NUMERICS = Numerics(width=WIDTH, fixed=False, border=32, prefill_chunk=32)
STOCK, MODEL = tiny.wrapped_pair("LlamaConfig", NUMERICS)


def replayed_model(*, fixed: bool) -> CachedModel:
    """The same weights, in passes that would be captured."""
    numerics = Numerics(width=WIDTH, fixed=fixed, border=None, prefill_chunk=32)
    lm = tiny.tiny_causal_lm(tiny.tiny_config())
    return wrap_model(lm, LoadOptions(numerics=numerics, max_model_len=tiny.MAX_LENGTH, capture=run_each_time))


REPLAYED = replayed_model(fixed=False)


@dataclass
class Node:
    """A token behind `parent`; None: behind the prompt."""

    token_id: int
    parent: Node | None
    slot: int = -1  # until it is computed

    @property
    def path(self) -> list[Node]:
        return [*([] if self.parent is None else self.parent.path), self]


@dataclass
class Tree:
    """A prompt in the cache, and nodes behind it in any of the other slots."""

    model: CachedModel
    prompt: list[int]
    cache: PreallocatedCache = field(init=False)
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
        return self.model.forward_trees([tree_rows(token_ids, prefix, paths, self.cache)])[0].logits.clone()

    def expected(self, stock: Any, nodes: Sequence[Node]) -> Tensor:
        paths = [[*self.prompt, *(ancestor.token_id for ancestor in node.path)] for node in nodes]
        return torch.stack([stock_logits(stock, path)[-1] for path in paths])


def grow(rng: random.Random, nodes: list[Node], number: int) -> None:
    for _ in range(number):
        nodes.append(Node(rng.randrange(tiny.VOCAB), rng.choice([None, *nodes])))


def check(tree: Tree, stock: Any, nodes: Sequence[Node]) -> None:
    expected = tree.expected(stock, nodes)
    assert expected.std() > 0.05, "the weights are too small for this test to see anything"
    torch.testing.assert_close(tree.compute(nodes), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("model", [MODEL, REPLAYED], ids=["computed anew", "replayed"])
@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_node_in_any_slot_of_any_batch_gets_the_logits_of_its_path(model: CachedModel, seed: int) -> None:
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


@pytest.mark.parametrize("model", [MODEL, REPLAYED], ids=["computed anew", "replayed"])
def test_a_narrow_pass_sees_nothing_of_a_wide_one_before_it(model: CachedModel) -> None:
    """The buffers of a captured pass still hold slots and paths of the wide one; fewer and shorter ones follow."""
    tree = Tree(model, random_ids(PROMPT))
    chain: list[Node] = []
    for token_id in random_ids(3, seed=1):
        chain.append(Node(token_id, chain[-1] if chain else None))
    check(tree, STOCK, [*chain, *(Node(token_id, chain[-1]) for token_id in random_ids(WIDTH - 3, seed=2))])
    for seed, parent in enumerate((None, chain[0], chain[1]), start=3):
        first = Node(random_ids(1, seed)[0], parent)
        check(tree, STOCK, [first, Node(5, first)])
        check(tree, STOCK, [Node(6, first)])


@pytest.mark.parametrize("model_impl", ["amusd", "transformers"])
def test_a_chain_that_is_not_computed_yet_goes_through_in_one_pass(model_impl: str) -> None:
    stock, model = tiny.wrapped_pair("LlamaConfig", NUMERICS, model_impl)
    tree = Tree(model, random_ids(PROMPT))
    tree.free.reverse()
    chain: list[Node] = []
    for token_id in random_ids(WIDTH, seed=2):
        chain.append(Node(token_id, chain[-1] if chain else None))
    check(tree, stock, list(reversed(chain)))
    check(tree, stock, [Node(5, chain[-1]), Node(6, chain[-1]), Node(7, chain[3])])


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_every_architecture_of_transformers_computes_trees(name: str) -> None:
    stock, model = tiny.wrapped_pair(name, NUMERICS, model_impl="transformers")
    tree, rng = Tree(model, random_ids(PROMPT)), random.Random(name)
    rng.shuffle(tree.free)
    nodes: list[Node] = []
    grow(rng, nodes, WIDTH)
    check(tree, stock, nodes)
    grow(rng, nodes, WIDTH)
    check(tree, stock, nodes[WIDTH:])


@pytest.mark.parametrize("name", ["Qwen2Config", "Qwen3Config", "MistralConfig"])
def test_the_decoder_computes_trees_of_its_other_architectures(name: str) -> None:
    stock, model = tiny.wrapped_pair(name, NUMERICS, model_impl="amusd")
    tree = Tree(model, random_ids(PROMPT))
    nodes: list[Node] = []
    grow(random.Random(0), nodes, WIDTH)
    check(tree, stock, nodes)


def test_a_slot_keeps_nothing_of_the_node_that_had_it() -> None:
    prompt, nodes = random_ids(PROMPT), [Node(token_id, None) for token_id in random_ids(WIDTH, seed=3)]
    fresh, used = Tree(MODEL, prompt), Tree(MODEL, prompt)
    slots = used.free.copy()
    for start in range(0, SPARE, WIDTH):
        used.compute([Node(token_id, None) for token_id in random_ids(WIDTH, seed=start)])
    assert not used.free
    used.free = slots
    assert torch.equal(used.compute(nodes), fresh.compute(nodes))  # what is masked counts for exactly nothing


@pytest.mark.parametrize("name", ["LlamaConfig", "GPT2Config"])
def test_slots_reach_beyond_the_last_position(name: str) -> None:
    stock, model = tiny.wrapped_pair(name, NUMERICS)
    prompt = random_ids(tiny.MAX_LENGTH - 2)
    cache = model.new_cache(tiny.MAX_LENGTH, spare=SPARE)
    model.prefill(prompt, cache)
    num_slots = tiny.MAX_LENGTH + SPARE
    first, second, third = num_slots - 1, num_slots - 2, num_slots - 3
    slots = [[first], [first, second], [first, third]]  # two behind the first
    logits = model.forward_trees([tree_rows([7, 8, 9], np.arange(len(prompt)), slots, cache)])[0].logits
    paths = [[*prompt, 7], [*prompt, 7, 8], [*prompt, 7, 9]]
    expected = torch.stack([stock_logits(stock, path)[-1] for path in paths])
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("fixed", [True, False])
def test_a_tree_and_replayed_blocks_take_turns_in_one_cache(fixed: bool) -> None:
    model = replayed_model(fixed=fixed)
    tree = Tree(model, random_ids(PROMPT))
    nodes: list[Node] = []
    tree.cache.truncate(PROMPT - 1)
    logits = model.forward(tree.prompt[-1:], tree.cache).logits.clone()  # padded, and written to where nodes come
    grow(random.Random(1), nodes, 5)
    check(tree, STOCK, nodes)
    tree.cache.truncate(PROMPT - 1)
    assert torch.equal(model.forward(tree.prompt[-1:], tree.cache).logits, logits)


GOOD: dict[str, Any] = {
    "token_ids": [5, 6],
    "prefix": np.arange(PROMPT),
    "paths": [[PROMPT], [PROMPT, PROMPT + 1]],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": []}, "0 rows: allowed are 1 to 8"),
        ({"token_ids": [1] * 9}, "9 rows: allowed are 1 to 8"),
        ({"token_ids": [5, 6, 7]}, "3 token ids need as many paths"),
        ({"paths": [[PROMPT], []]}, "none of them empty"),
        ({"token_ids": [5, tiny.VOCAB]}, "token ids must be in"),
        ({"token_ids": [5, -1]}, "token ids must be in"),
        ({"paths": [[PROMPT], list(range(PROMPT, tiny.MAX_LENGTH + 1))]}, "positions must be in"),
        ({"paths": [[PROMPT], [10_000]]}, "slots must be in"),
        ({"paths": [[PROMPT], [PROMPT, -1]]}, "slots must be in"),
        ({"prefix": np.array([-1])}, "slots must be in"),
        ({"prefix": np.array([10_000])}, "slots must be in"),
        ({"paths": [[PROMPT], [PROMPT]]}, "each row needs its own"),
        ({"paths": [[PROMPT], [PROMPT + 1, PROMPT + 2, PROMPT + 1]]}, "no slot twice"),
        ({"paths": [[PROMPT], [3]]}, "nor one of the prefix"),
    ],
)
def test_what_no_path_can_be_is_refused_before_any_change(changes: dict[str, Any], message: str) -> None:
    tree = Tree(MODEL, random_ids(PROMPT))
    MODEL.forward_trees([tree_rows(**GOOD, cache=tree.cache)])
    probe = ([9], np.arange(PROMPT), [[PROMPT, PROMPT + 1, PROMPT + 2]], tree.cache)  # behind both
    before = MODEL.forward_trees([tree_rows(*probe)])[0].logits
    with pytest.raises(ValueError, match=message):
        MODEL.forward_trees([tree_rows(**{**GOOD, **changes}, cache=tree.cache)])
    assert tree.cache.length == PROMPT
    assert torch.equal(MODEL.forward_trees([tree_rows(*probe)])[0].logits, before)


def test_a_foreign_cache_and_a_negative_spare_are_refused() -> None:
    with pytest.raises(TypeError, match="new_cache"):
        MODEL.forward_trees([tree_rows(**GOOD, cache=object())])  # type: ignore[arg-type]  # the point of the test
    with pytest.raises(ValueError, match="spare=-1"):
        MODEL.new_cache(8, spare=-1)


def test_capacity_and_spare_slots_are_all_there() -> None:
    cache = MODEL.new_cache(1, spare=500)
    assert cache.capacity == 1
    alone = MODEL.forward_trees([tree_rows([5], np.arange(0), [[500]], cache)])[0].logits
    torch.testing.assert_close(alone, stock_logits(STOCK, [5]), atol=1e-3, rtol=1e-3)


# Several paths behind one token

FIXED = Numerics(width=8, fixed=True, border=64, prefill_chunk=64, num_tracks=3)
EXPERTS = {"JetMoeConfig", "Qwen3MoeConfig", "GptOssConfig", "DeepseekV3Config"}
"""How many rows share an expert's product depends on the other rows."""


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_each_row_of_several_paths_has_the_logits_of_its_path_alone(name: str) -> None:
    """Bit for bit, but for mixtures of experts."""
    _, model = tiny.wrapped_pair(name, FIXED)
    expected, found = decoded_both_ways(model)
    if name not in EXPERTS:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["LlamaConfig", "Gemma3TextConfig", "GptOssConfig", "DeepseekV3Config", "GPT2Config"])
@pytest.mark.parametrize("fixed", [True, False])
def test_replayed_paths_have_the_logits_of_their_path_alone(name: str, fixed: bool) -> None:
    """As on a GPU: bit for bit at a fixed width, but for what cannot use `attend_rows`, and mixtures of experts."""
    rule = Numerics(width=8, fixed=fixed, border=None, prefill_chunk=64, num_tracks=3)
    lm = tiny.tiny_causal_lm(tiny.tiny_config(name), register_attention())
    model = wrap_model(lm, LoadOptions(numerics=rule, max_model_len=220, capture=run_each_time))
    expected, found = decoded_both_ways(model)
    if fixed and name not in EXPERTS:
        assert torch.equal(found, expected)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_paths_fit_at_the_very_end_of_a_replayed_cache() -> None:
    rule = Numerics(width=8, fixed=False, border=None, prefill_chunk=16, num_tracks=3)
    lm = tiny.tiny_causal_lm(tiny.tiny_config(), register_attention())
    model = wrap_model(lm, LoadOptions(numerics=rule, max_model_len=96, capture=run_each_time))
    cache = model.new_cache(96)
    model.prefill(random_ids(93), cache)
    chosen = model.forward([5, 6, 7, 8, 9], cache, parents=[0, 0, 0, 3]).choose()
    expected = model.forward([5, 6, 7, 8, 9], cache, parents=[0, 0, 0, 3]).logits.argmax(-1).tolist()
    assert chosen == expected
    model.keep([0, 3, 4], cache)
    assert cache.length == 96
    with pytest.raises(ValueError, match="not one over paths"):
        model.keep([0], cache)


@pytest.mark.parametrize("replayed", [False, True], ids=["computed anew", "replayed"])
def test_several_paths_behind_wider_ones_have_the_logits_of_stock(replayed: bool) -> None:
    """And rows of a pass can be kept right behind it alone, whatever kind of pass came in between."""
    rule = Numerics(width=8, fixed=False, border=None, prefill_chunk=32, num_tracks=3) if replayed else FIXED
    lm = tiny.tiny_causal_lm(tiny.tiny_config(), register_attention())
    options = LoadOptions(numerics=rule, max_model_len=96, capture=run_each_time if replayed else None)
    model = wrap_model(lm, options)
    prompt = random_ids(10)
    cache = model.new_cache(60, spare=8)
    model.prefill(prompt, cache)
    for parents in ([0, 0, 0, 1, 2, 3, 4], [0, 1, 2, 2], [0, 0], [0]):
        tokens, paths = random_ids(len(parents) + 1, seed=len(parents)), [[0]]
        for row, parent in enumerate(parents, start=1):
            paths.append([*paths[parent], row])
        expected = [stock_logits(STOCK, prompt + [tokens[row] for row in path])[-1] for path in paths]
        logits = model.forward(tokens, cache, parents=parents).logits
        torch.testing.assert_close(logits, torch.stack(expected), atol=1e-3, rtol=1e-3)

    def tree_pass() -> None:
        model.forward_trees([tree_rows([5], np.arange(10), [[40]], cache)])

    for other in (lambda: model.forward([5], cache).choose(), lambda: model.prefill([5], cache), tree_pass):
        model.forward([5, 6, 7], cache, parents=[0, 0])
        other()
        length = cache.length
        with pytest.raises(ValueError, match="not one over paths"):
            model.keep([0, 2], cache)
        assert cache.length == length
        cache.truncate(10)


def test_rows_of_several_paths_keep_their_order_and_their_lanes() -> None:
    rows = lay_out_paths([0, 0, 1, 2, 2, 4], start=70, num_tracks=3, stride=16)
    assert rows.positions == [70, 71, 71, 72, 72, 72, 73]
    assert rows.slots == [70, 71, 87, 72, 88, 104, 89]
    assert [list(np.flatnonzero(seen))[70:] for seen in rows.visible(128, 8)] == [
        [70], [70, 71], [70, 87], [70, 71, 72], [70, 87, 88], [70, 87, 104], [70, 87, 88, 89], [70],
    ]  # fmt: skip


def test_what_no_pass_over_several_paths_can_be_is_refused() -> None:
    _, model = tiny.wrapped_pair("LlamaConfig", FIXED)
    cache = model.new_cache(100)
    model.prefill(random_ids(20), cache)
    refused: list[tuple[list[int], list[int], str]] = [
        ([5, 5, 5, 5, 5], [0, 0, 0, 0], "3 tracks are not enough"),
        ([5, 5], [1], "parents come first"),
        ([5, 5], [], "parents"),
        ([5] * 9, [0] * 8, "1 to 8 rows"),
        ([5, 97], [0], "token ids"),
    ]
    for token_ids, parents, words in refused:
        with pytest.raises(ValueError, match=words):
            model.forward(token_ids, cache, parents=parents)
    assert cache.length == 20
    model.prefill(random_ids(35), cache)
    assert model.num_tracks(55) == 1
    with pytest.raises(ValueError, match="no room at position 55"):
        model.forward([5, 5], cache, parents=[0])
