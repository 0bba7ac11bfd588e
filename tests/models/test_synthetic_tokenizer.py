"""Words for the ids of any vocabulary: the same alone and in company, and back to the same ids."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from amusd.models.detokenizer import IncrementalDecoder
from amusd.models.synthetic import SyntheticTokenizer
from amusd.models.tokenizer import Tokenizer, user_turn

vocabularies = st.integers(2, 200_000)


@st.composite
def vocabulary_and_ids(draw: st.DrawFn) -> tuple[int, list[int]]:
    vocab_size = draw(vocabularies)
    return vocab_size, draw(st.lists(st.integers(0, vocab_size - 1), max_size=30))


@given(case=vocabulary_and_ids())
def test_ids_to_text_and_back_are_the_same_ids_and_token_by_token_the_same_text(case: tuple[int, list[int]]) -> None:
    vocab_size, token_ids = case
    tokenizer = SyntheticTokenizer(vocab_size)
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.push(token_id) for token_id in token_ids]
    assert all(re.fullmatch(r" [0-9]{1,6}", piece) for piece in pieces)
    assert "".join(pieces) == tokenizer.decode(token_ids)
    assert decoder.flush() == ""
    assert tokenizer.encode(tokenizer.decode(token_ids)) == token_ids


@given(vocab_size=vocabularies, text=st.text())
def test_any_text_has_the_same_ids_every_time_and_all_are_in_the_vocabulary(vocab_size: int, text: str) -> None:
    tokenizer = SyntheticTokenizer(vocab_size)
    token_ids = tokenizer.encode(text)
    assert token_ids == SyntheticTokenizer(vocab_size).encode(text)
    assert all(0 <= token_id < vocab_size for token_id in token_ids)
    assert bool(token_ids) == bool(text)
    assert tokenizer.encode_chat(user_turn(text)) == token_ids


def test_a_pair_fits_if_the_vocabularies_are_of_one_size() -> None:
    tokenizer = SyntheticTokenizer(1000)
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.eos_token_ids == frozenset()
    assert tokenizer.fingerprint == SyntheticTokenizer(1000).fingerprint != SyntheticTokenizer(1001).fingerprint
