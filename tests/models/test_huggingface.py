"""The bookkeeping of passes over any causal language model, and those that transformers computes."""

from __future__ import annotations

import pytest
import torch
from models import tiny
from models.blocks import NUMERICS, decode_in_blocks, random_ids, stock_logits
from passes import forward

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


def test_the_last_position_of_a_full_cache_can_be_computed_with_padding() -> None:
    stock, model = tiny.wrapped_pair("GPT2Config")  # its position table has no row beyond max_length
    token_ids = random_ids(tiny.MAX_LENGTH)
    cache = model.new_cache(tiny.MAX_LENGTH)
    model.prefill(token_ids[:-1], cache)
    expected = stock_logits(stock, token_ids)[-1:]
    torch.testing.assert_close(forward(model, token_ids[-1:], cache).logits, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "token_ids",
    [[], [1] * 9, [tiny.VOCAB], [1] * 5],
    ids=["no token", "more than the width", "an id beyond the vocabulary", "more than fit"],
)
def test_a_refused_forward_leaves_the_cache_as_it_was(token_ids: list[int]) -> None:
    _, model = tiny.wrapped_pair("LlamaConfig")
    cache = model.new_cache(20)
    model.prefill(random_ids(16), cache)
    with pytest.raises(ValueError, match=r"tokens|token ids"):
        forward(model, token_ids, cache)
    assert cache.length == 16
