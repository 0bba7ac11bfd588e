"""Sequences as chains or trees, passes over them in any layout, and the expected rows, which depend on no layout.

A pass is laid out at random: slots, order of rows, padded rows, order of paths, width of the table. What no row may
read holds NaN (slots) or a number far out of range (entries of tables and branches).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from amusd.models.attention import Window

UNUSED = 10**12
Inputs = tuple[Any, ...]
"""The first nine arguments of `attend_rows`, or all."""
Attend = Callable[[Inputs], Tensor]


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    key_heads: int = 1
    dim: int = 16
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Tokens:
    length: int
    parents: tuple[int | None, ...]
    keys: Tensor
    """[key_heads, length + nodes, dim]."""
    values: Tensor
    queries: Tensor
    """[nodes, heads, dim]."""

    def path(self, node: int) -> list[int]:
        parent = self.parents[node]
        return [*([] if parent is None else self.path(parent)), node]

    @property
    def depth(self) -> int:
        return max(len(self.path(node)) for node in range(len(self.parents)))

    def leaf_below(self, node: int, rng: random.Random) -> int:
        while children := [child for child, parent in enumerate(self.parents) if parent == node]:
            node = rng.choice(children)
        return node

    def alone(self, node: int) -> Tokens:
        path = self.path(node)
        places = [*range(self.length), *(self.length + each for each in path)]
        keys, values, query = self.keys[:, places], self.values[:, places], self.queries[node : node + 1]
        return Tokens(self.length + len(path) - 1, (None,), keys, values, query)


def random_tokens(rng: random.Random, shape: Shape, length: int, num_nodes: int, *, tree: bool) -> Tokens:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    first = 0 if length else 1  # a tree that follows no token has one root
    parents: list[int | None] = [None]
    for node in range(1, num_nodes):
        choices = [*range(node), *([] if first else [None])]
        parents.append(rng.choice(choices) if tree else node - 1)
    cached = torch.randn((2, shape.key_heads, length + num_nodes, shape.dim), generator=generator).to(shape.dtype)
    queries = torch.randn((num_nodes, shape.heads, shape.dim), generator=generator).to(shape.dtype)
    return Tokens(length, tuple(parents), cached[0], cached[1], queries)


def lay_out(
    sequences: Sequence[Tokens], rng: random.Random, *, chain: bool, spare: int = 0
) -> tuple[Inputs, list[list[int | None]]]:
    """A pass over all nodes of all sequences; returns it and, by sequence, the node of each row (None: padded).

    `chain`: the table holds the nodes as well, and there are no branches. `spare`: positions and slots beyond those
    that are needed, and up to three padded rows and paths.
    """
    padding = min(spare, 3)
    num_rows = max(len(each.parents) for each in sequences) + padding
    width = max(each.length + each.depth for each in sequences) + spare
    num_slots = sum(each.keys.shape[1] for each in sequences) + spare + 1
    free = rng.sample(range(num_slots), num_slots)
    like = sequences[0].keys
    cached = torch.full((2, like.shape[0], num_slots, like.shape[2]), torch.nan, dtype=like.dtype)
    query = torch.full((len(sequences), num_rows, *sequences[0].queries.shape[1:]), 7.0, dtype=like.dtype)
    table = torch.full((len(sequences), width), UNUSED)
    branches = torch.full((len(sequences), 0 if chain else num_rows, num_rows), UNUSED)
    row_paths, positions = torch.zeros((2, len(sequences), num_rows), dtype=torch.int64)
    lengths = torch.zeros(len(sequences), dtype=torch.int64)
    placed: list[list[int | None]] = []
    for index, tokens in enumerate(sequences):
        slots = [free.pop() for _ in range(tokens.keys.shape[1])]
        cached[:, :, slots] = torch.stack((tokens.keys, tokens.values))
        in_table = len(slots) if chain else tokens.length
        lengths[index] = in_table + (rng.choice((0, spare)) if chain else 0)
        table[index, :in_table] = torch.tensor(slots[:in_table], dtype=torch.int64)
        leaves = [node for node in range(len(tokens.parents)) if node not in tokens.parents]
        paths = dict(zip(leaves, rng.sample(range(num_rows), len(leaves)), strict=True))
        for leaf, path in {} if chain else paths.items():
            for depth, node in enumerate(tokens.path(leaf)):
                branches[index, path, depth] = slots[tokens.length + node]
        rows: list[int | None] = [*range(len(tokens.parents)), *[None] * (num_rows - len(tokens.parents))]
        rng.shuffle(rows)
        for row, node in enumerate(rows):
            positions[index, row] = -1 if node is None else tokens.length + len(tokens.path(node)) - 1
            if node is not None:
                query[index, row] = tokens.queries[node]
                row_paths[index, row] = paths[tokens.leaf_below(node, rng)]
        placed.append(rows)
    scaling = like.shape[2] ** -0.5
    return (query, cached[0], cached[1], table, lengths, branches, row_paths, positions, scaling), placed


def check(
    attend: Attend,
    sequences: Sequence[Tokens],
    rng: random.Random,
    *,
    chain: bool,
    spare: int,
    tolerance: float,
    window: Window | None = None,
) -> None:
    """One pass over all nodes, and one pass for each node alone: a chain of one row, whose table has no spare."""

    def with_window(inputs: Inputs) -> Inputs:
        return (*inputs, 0.0, None, None if window is None else window.first(inputs[7]))

    inputs, placed = lay_out(sequences, rng, chain=chain, spare=spare)
    if window is not None:
        for tokens, slots, positions in zip(sequences, inputs[3], inputs[7], strict=True):
            unseen = slots[: max(0, min(tokens.length, window.first(int(positions[positions >= 0].min()))))]
            inputs[1][:, unseen] = inputs[2][:, unseen] = torch.nan
    for tokens, rows, result in zip(sequences, placed, attend(with_window(inputs)), strict=True):
        assert {*rows} >= {*range(len(tokens.parents))}
        for node, row in zip(rows, result, strict=True):
            if node is None:
                assert not row.any(), "a padded row that is not 0"
                continue
            single = tokens.alone(node)
            assert torch.equal(attend(with_window(lay_out([single], rng, chain=True)[0]))[0, 0], row)
            torch.testing.assert_close(row.float(), expected(single, window), rtol=0, atol=tolerance)


def expected(single: Tokens, window: Window | None) -> Tensor:
    """Torch's attention of the only node, [heads, dim] in float32."""
    group, end = single.queries.shape[1] // len(single.keys), single.keys.shape[1]
    first = 0
    if window is not None:
        first = (end - 1) // window.size * window.size if window.is_chunk else max(0, end - window.size)
    cached = (single.keys[:, first:], single.values[:, first:])
    keys, values = (each.float().repeat_interleave(group, 0) for each in cached)
    return F.scaled_dot_product_attention(single.queries[0].float().unsqueeze(1), keys, values).squeeze(1)
