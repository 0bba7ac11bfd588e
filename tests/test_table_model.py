from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from passes import forward
from table_model import TableModel, TableTokenizer

from amusd.models.language_model import LanguageModel
from amusd.models.numerics import Numerics
from amusd.models.tokenizer import Tokenizer

VOCAB = 11
token_lists = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)


def logits_after(model: TableModel, token_ids: list[int]) -> torch.Tensor:
    return forward(model, token_ids, model.new_cache(64)).logits


def test_model_and_tokenizer_satisfy_their_protocols() -> None:
    assert isinstance(TableModel(VOCAB), LanguageModel)
    assert isinstance(TableTokenizer(VOCAB), Tokenizer)


@given(tokens=token_lists, cut=st.integers(0, 30), wrong=token_lists)
def test_any_split_with_a_rollback_gives_the_same_bits(tokens: list[int], cut: int, wrong: list[int]) -> None:
    model = TableModel(VOCAB, seed=3)
    cut = min(cut, len(tokens) - 1)
    cache = model.new_cache(64)
    model.prefill(tokens[:cut], cache)
    forward(model, wrong, cache)
    cache.truncate(cut)
    assert torch.equal(forward(model, tokens[cut:], cache).logits, logits_after(model, tokens)[cut:])


@given(tokens=token_lists, index=st.integers(0, 29), other=st.integers(0, VOCAB - 1))
def test_every_earlier_token_matters(tokens: list[int], index: int, other: int) -> None:
    index %= len(tokens)
    changed = [*tokens[:index], other, *tokens[index + 1 :]]
    model = TableModel(VOCAB)
    assert torch.equal(logits_after(model, tokens)[-1], logits_after(model, changed)[-1]) == (changed == tokens)


def test_blocks_are_cut_as_the_numerics_say() -> None:
    model = TableModel(VOCAB, numerics=Numerics(width=4, fixed=True, border=64))
    cache = model.new_cache(100)
    model.prefill([1] * 62, cache)
    with pytest.raises(ValueError, match="at most 2"):
        forward(model, [1, 1, 1], cache)
    assert cache.length == 62
