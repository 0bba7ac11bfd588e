"""The bookkeeping of passes over any causal language model, and those that transformers computes."""

from __future__ import annotations

import pytest
import torch
from models import tiny
from models.blocks import NUMERICS, decode_in_blocks, random_ids, stock_logits

from amusd.models.language_model import LanguageModel
from amusd.models.numerics import Numerics


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_ragged_blocks_with_rollbacks_agree_with_the_stock_forward(name: str, numerics: Numerics) -> None:
    stock, model = tiny.wrapped_pair(name, numerics, model_impl="transformers")
    assert model.implementation == "transformers"
    token_ids = random_ids(110)
    cache = model.new_cache(110)
    model.prefill(token_ids[:41], cache)
    expected = stock_logits(stock, token_ids)[41:]
    assert expected.std() > 0.05, "the weights are too small for this test to see anything"
    torch.testing.assert_close(decode_in_blocks(model, token_ids, cache), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_a_truncated_cache_continues_as_a_fresh_one(name: str) -> None:
    _, model = tiny.wrapped_pair(name, model_impl="transformers")
    token_ids, other = random_ids(60), random_ids(60, seed=5)
    fresh = model.new_cache(100)
    model.prefill(token_ids[:40], fresh)
    used = model.new_cache(100)
    model.prefill(token_ids[:40] + other, used)
    used.truncate(40)
    for start in (40, 44):
        expected = model.forward(token_ids[start : start + 4], fresh).logits
        # Not bit by bit: the prompts were prefilled in chunks of other lengths, and experts share rows by routing.
        logits = model.forward(token_ids[start : start + 4], used).logits
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_it_is_a_language_model() -> None:
    _, model = tiny.wrapped_pair("LlamaConfig")
    assert isinstance(model, LanguageModel)
    assert (model.vocab_size, model.max_length, model.output_ids) == (tiny.VOCAB, tiny.MAX_LENGTH, None)


def test_the_last_position_of_a_full_cache_can_be_computed_with_padding() -> None:
    stock, model = tiny.wrapped_pair("GPT2Config")  # its position table has no row beyond max_length
    token_ids = random_ids(tiny.MAX_LENGTH)
    cache = model.new_cache(tiny.MAX_LENGTH)
    model.prefill(token_ids[:-1], cache)
    expected = stock_logits(stock, token_ids)[-1:]
    torch.testing.assert_close(model.forward(token_ids[-1:], cache).logits, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "token_ids",
    [[], [1] * 9, [tiny.VOCAB], [-1], [1] * 5],
    ids=["no token", "more than the width", "an id beyond the vocabulary", "a negative id", "more than fit"],
)
def test_a_refused_forward_leaves_the_cache_as_it_was(token_ids: list[int]) -> None:
    _, model = tiny.wrapped_pair("LlamaConfig")
    cache = model.new_cache(20)
    model.prefill(random_ids(16), cache)
    with pytest.raises(ValueError, match=r"tokens|token ids"):
        model.forward(token_ids, cache)
    assert cache.length == 16


def test_a_block_that_crosses_a_border_is_refused_in_fixed_mode() -> None:
    _, model = tiny.wrapped_pair("LlamaConfig")
    cache = model.new_cache(60)
    model.prefill(random_ids(30), cache)
    with pytest.raises(ValueError, match="allowed are 1 to 2"):
        model.forward([1, 2, 3], cache)


@pytest.mark.parametrize("length", [-1, 17])
def test_an_impossible_truncation_changes_nothing(length: int) -> None:
    _, model = tiny.wrapped_pair("LlamaConfig")
    cache = model.new_cache(20)
    model.prefill(random_ids(16), cache)
    with pytest.raises(ValueError, match="cannot truncate"):
        cache.truncate(length)
    assert cache.length == 16


@pytest.mark.parametrize("capacity", [0, tiny.MAX_LENGTH + 1])
def test_a_cache_beyond_the_model_is_refused(capacity: int) -> None:
    _, model = tiny.wrapped_pair("LlamaConfig")
    with pytest.raises(ValueError, match="must be between"):
        model.new_cache(capacity)


def test_a_foreign_cache_is_refused() -> None:
    _, model = tiny.wrapped_pair("LlamaConfig")
    with pytest.raises(TypeError, match="new_cache"):
        model.forward([1], object())  # type: ignore[arg-type]  # the point of the test
