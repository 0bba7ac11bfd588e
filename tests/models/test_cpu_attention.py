"""Attention on a CPU is that of the definition; its bits are in `test_paths.py` and `test_exactness.py`."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from amusd.models.attention import AttentionInputs, Window
from amusd.models.cpu_attention import Part, cpu_attention, seen_by_chain
from amusd.models.numerics import PROMPT_STEP

LONG = 10 * PROMPT_STEP


@dataclass(frozen=True)
class Layer:
    """Keys and values [key_heads, slots, dim] of a cache, and how many query heads share a key head."""

    keys: Tensor
    values: Tensor
    groups: int

    def queries(self, rows: int, seed: int) -> Tensor:
        """[rows, heads, dim]."""
        heads = self.keys.shape[0] * self.groups
        return torch.randn(rows, heads, self.keys.shape[2], generator=torch.Generator().manual_seed(seed))

    def attend(self, query: Tensor, seen: Tensor, window: Window | None) -> Tensor:
        """[rows, heads, dim]. `seen`: as of `Part`."""
        attention = cpu_attention([Part(range(len(query)), seen, 0)], len(query))
        return attention(AttentionInputs(query, self.keys, self.values, query.shape[2] ** -0.5, window=window))

    def exact(self, query: Tensor, visible: Tensor) -> Tensor:
        """The same in float64."""
        end = visible.shape[1]
        keys, values = (part[:, :end].double().repeat_interleave(self.groups, 0) for part in (self.keys, self.values))
        scores = torch.einsum("rhd,hsd->rhs", query.double(), keys) * query.shape[2] ** -0.5
        weights = scores.masked_fill(~visible.unsqueeze(1), -torch.inf).softmax(-1)
        return torch.einsum("rhs,hsd->rhd", weights, values)


def layer(*, key_heads: int = 2, groups: int = 3, dim: int = 32) -> Layer:
    generator = torch.Generator().manual_seed(key_heads * dim + groups)
    keys, values = torch.randn(2, key_heads, LONG, dim, generator=generator)
    return Layer(keys, values, groups)


def check(cache: Layer, query: Tensor, seen: Tensor) -> None:
    own = seen.amax(1, keepdim=True)
    for window, near in (
        (None, seen >= 0),
        (Window(70), own - seen < 70),
        (Window(70, is_chunk=True), own // 70 == seen.div(70, rounding_mode="floor")),
    ):
        expected = cache.exact(query, (seen >= 0) & near)
        torch.testing.assert_close(cache.attend(query, seen, window).double(), expected, atol=1e-5, rtol=0)


@settings(max_examples=15)
@given(
    shape=st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 3, 4]), st.sampled_from([16, 64])),
    start=st.integers(0, LONG - 200),
    rows=st.sampled_from([1, 2, 8, 128]),
)
def test_a_chain_gets_the_attention_of_the_definition(shape: tuple[int, int, int], start: int, rows: int) -> None:
    key_heads, groups, dim = shape
    cache = layer(key_heads=key_heads, groups=groups, dim=dim)
    check(cache, cache.queries(rows, start), seen_by_chain(start, rows, start + rows))


@settings(max_examples=10)
@given(shared=st.integers(1, LONG - 60), rows=st.sampled_from([1, 5, 16]), seed=st.integers(0, 1000))
def test_rows_of_a_tree_see_their_own_slots_after_what_all_share(shared: int, rows: int, seed: int) -> None:
    cache, rng = layer(), random.Random(seed)
    seen = torch.full((rows, LONG), -1)
    seen[:, :shared] = torch.arange(shared)
    for row in seen:
        number = rng.randint(1, 40)
        row[rng.sample(range(shared, LONG), number)] = torch.arange(shared, shared + number)
    check(cache, cache.queries(rows, seed), seen)
