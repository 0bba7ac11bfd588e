from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from table_model import TableModel, TableTokenizer

from amusd.models.language_model import LanguageModel
from amusd.models.numerics import Numerics
from amusd.models.tokenizer import Tokenizer

VOCAB = 11
token_lists = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)


def logits_after(model: TableModel, token_ids: list[int]) -> torch.Tensor:
    return model.forward(token_ids, model.new_cache(64)).logits


def test_model_and_tokenizer_satisfy_their_protocols() -> None:
    assert isinstance(TableModel(VOCAB), LanguageModel)
    assert isinstance(TableTokenizer(VOCAB), Tokenizer)


@given(tokens=token_lists, cut=st.integers(0, 30), wrong=token_lists)
def test_any_split_with_a_rollback_gives_the_same_bits(tokens: list[int], cut: int, wrong: list[int]) -> None:
    model = TableModel(VOCAB, seed=3)
    cut = min(cut, len(tokens) - 1)
    cache = model.new_cache(64)
    model.prefill(tokens[:cut], cache)
    model.forward(wrong, cache)
    cache.truncate(cut)
    assert torch.equal(model.forward(tokens[cut:], cache).logits, logits_after(model, tokens)[cut:])


@given(tokens=token_lists, index=st.integers(0, 29), other=st.integers(0, VOCAB - 1))
def test_every_earlier_token_matters(tokens: list[int], index: int, other: int) -> None:
    index %= len(tokens)
    changed = [*tokens[:index], other, *tokens[index + 1 :]]
    model = TableModel(VOCAB)
    assert torch.equal(logits_after(model, tokens)[-1], logits_after(model, changed)[-1]) == (changed == tokens)


@pytest.mark.parametrize("vocab_size", [2, VOCAB, 50_000])
def test_scores_never_tie(vocab_size: int) -> None:
    logits = logits_after(TableModel(vocab_size), [0, 1, 1, 0])
    assert logits.dtype == torch.float64
    assert all(len(row.unique()) == vocab_size for row in logits)


def test_every_token_is_chosen_sometimes() -> None:
    model = TableModel(VOCAB, max_length=2000)
    best = model.forward([index % VOCAB for index in range(2000)], model.new_cache(2000)).logits.argmax(-1)
    assert best.bincount(minlength=VOCAB).min() > 100  # 182 expected; below 100 has probability under 1e-9


def test_the_seed_makes_another_model() -> None:
    assert not torch.equal(logits_after(TableModel(VOCAB, seed=1), [3]), logits_after(TableModel(VOCAB, seed=2), [3]))


def test_blocks_are_cut_as_the_numerics_say() -> None:
    model = TableModel(VOCAB, numerics=Numerics(width=4, fixed=True, border=64))
    cache = model.new_cache(100)
    model.prefill([1] * 62, cache)
    assert model.max_rows(62) == 2
    with pytest.raises(ValueError, match="at most 2"):
        model.forward([1, 1, 1], cache)
    assert cache.length == 62


@given(tokens=token_lists)
def test_the_tokenizer_round_trips(tokens: list[int]) -> None:
    tokenizer = TableTokenizer(VOCAB)
    assert tokenizer.encode(tokenizer.decode(tokens)) == tokens


def test_the_end_token_is_configurable_and_leaves_no_text() -> None:
    tokenizer = TableTokenizer(5, eos_token_id=4)
    assert tokenizer.eos_token_ids == {4}
    assert tokenizer.decode([0, 4, 1]) == "ab"
    assert all(0 <= token_id < 5 for token_id in tokenizer.encode("Why is the sky blue? 🎉"))
