"""Attention on a CPU: as exact as its dtype allows, and with bits that depend on a row's position alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from amusd.models.attention import AttentionInputs
from amusd.models.numerics import TRACK_STRIDE
from amusd.models.split_attention import BLOCK, SplitAttention

DTYPES = [torch.bfloat16, torch.float32]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
WIDTH = 8
LONG = 10 * BLOCK


@dataclass(frozen=True)
class Layer:
    """Keys and values [key_heads, slots, dim] of a cache, and how many query heads share a key head."""

    keys: Tensor
    values: Tensor
    groups: int

    def queries(self, rows: int, seed: int) -> Tensor:
        """[rows, heads, dim] float32."""
        heads = self.keys.shape[0] * self.groups
        return torch.randn(rows, heads, self.keys.shape[2], generator=torch.Generator().manual_seed(seed))

    def attend(self, attention: SplitAttention, query: Tensor, end: int) -> Tensor:
        """[rows, heads, dim], from the slots before `end`."""
        layer = AttentionInputs(query, self.keys[:, :end], self.values[:, :end], query.shape[2] ** -0.5)
        return attention.attend(layer)

    def exact(self, query: Tensor, visible: Tensor) -> Tensor:
        """The same in float64; `visible`: [rows, slots]."""
        end = visible.shape[1]
        keys, values = (part[:, :end].double().repeat_interleave(self.groups, 0) for part in (self.keys, self.values))
        scores = torch.einsum("rhd,hsd->rhs", query.double(), keys) * query.shape[2] ** -0.5
        weights = scores.masked_fill(~visible.unsqueeze(1), -torch.inf).softmax(-1)
        return torch.einsum("rhs,hsd->rhd", weights, values)


def layer(dtype: torch.dtype, *, slots: int = LONG, key_heads: int = 2, groups: int = 3, dim: int = 32) -> Layer:
    generator = torch.Generator().manual_seed(key_heads * dim + groups)
    keys, values = torch.randn(2, key_heads, slots, dim, generator=generator).to(dtype)
    return Layer(keys, values, groups)


def seen_by_chain(start: int, rows: int, end: int) -> Tensor:
    """[rows, end] bool."""
    return torch.arange(end) <= torch.arange(start, start + rows).unsqueeze(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=25)
@given(
    shape=st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 3, 4]), st.sampled_from([16, 64])),
    start=st.integers(0, LONG - 400),
    rows=st.sampled_from([1, 2, 8, 63, 64, 128, 129, 300]),
)
def test_a_chain_gets_the_attention_of_the_definition(
    dtype: torch.dtype, shape: tuple[int, int, int], start: int, rows: int
) -> None:
    key_heads, groups, dim = shape
    cache = layer(dtype, key_heads=key_heads, groups=groups, dim=dim)
    query, end = cache.queries(rows, start), start + rows
    found = cache.attend(SplitAttention.of_chain(start, rows, end, dtype), query, end)
    assert found.dtype in (dtype, torch.float32)
    expected = cache.exact(query, seen_by_chain(start, rows, end))
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=15)
@given(shared=st.integers(1, LONG - 60), rows=st.sampled_from([1, 5, 16]), seed=st.integers(0, 1000))
def test_rows_of_a_tree_see_their_own_slots_behind_what_all_share(
    dtype: torch.dtype, shared: int, rows: int, seed: int
) -> None:
    cache, rng = layer(dtype), random.Random(seed)
    visible = torch.zeros(rows, LONG, dtype=torch.bool)
    visible[:, :shared] = True
    for row in visible:
        row[rng.sample(range(shared, LONG), rng.randint(1, 40))] = True
    query = cache.queries(rows, seed)
    found = cache.attend(SplitAttention.of_paths(shared, visible, dtype), query, LONG)
    torch.testing.assert_close(found.double(), cache.exact(query, visible), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("first", [2 * BLOCK, 9 * BLOCK], ids=lambda first: f"behind {first} slots")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_track(dtype: torch.dtype, first: int) -> None:
    cache, end = layer(dtype), first + BLOCK
    query = cache.queries(WIDTH, seed=2)
    for start in (first, first + 5, first + 40):
        expected = cache.attend(SplitAttention.of_chain(start, WIDTH, end, dtype), query, end)
        for track in (1, 2):
            keys, values = cache.keys.clone(), cache.values.clone()
            moved = torch.arange(start + 1, start + WIDTH) + track * TRACK_STRIDE
            for part in (keys, values):
                part[:, moved] = part[:, start + 1 : start + WIDTH].clone()
                part[:, start + 1 : start + WIDTH] = 7.0  # rows of another path
            visible = torch.zeros(WIDTH, end, dtype=torch.bool)
            visible[:, : start + 1] = True
            for row in range(1, WIDTH):
                visible[row, moved[:row]] = True
            attention = SplitAttention.of_paths(start, visible, dtype)
            assert torch.equal(Layer(keys, values, cache.groups).attend(attention, query, end), expected)


@pytest.mark.parametrize("few", [8, 200], ids=lambda rows: f"{rows} rows")
def test_scores_of_hundreds_keep_their_differences_in_bfloat16(few: int) -> None:
    """As of models whose keys have large biases: next to 500, bfloat16 knows multiples of 2 only."""
    cache, start = layer(torch.bfloat16), LONG - 200
    query = cache.queries(few, seed=3)
    query[:, :, :4] = 30.0
    cache.keys[:, :, :4] = 24.0  # times 30, four times, by the root of 32: 509
    found = cache.attend(SplitAttention.of_chain(start, few, start + few, torch.bfloat16), query, start + few)
    expected = cache.exact(query, seen_by_chain(start, few, start + few))
    assert (found - expected).abs().max() < 0.05
    assert (found - expected).abs().mean() < 0.003
