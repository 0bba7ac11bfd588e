"""The n-gram cache against brute force: every place of the text compared with its end, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amusd.drafters.ngram import MAX_CONTINUATIONS, SHARES, NgramCache, NgramDrafter

MAX_MATCH = 4
texts = st.lists(st.integers(0, 4), max_size=30)


def cache_of(token_ids: Sequence[int], min_match: int = 1) -> NgramCache:
    cache = NgramCache(min_match, MAX_MATCH)
    cache.open(token_ids)
    return cache


def agreement(text: Sequence[int], end: int, context: Sequence[int]) -> int:
    """How many of the last tokens of `context` are those before `end` of `text`."""
    longest = min(end, len(context), MAX_MATCH)
    return max(n for n in range(longest + 1) if list(text[end - n : end]) == list(context[len(context) - n :]))


@settings(deadline=None, max_examples=300)
@given(text=texts, path=st.lists(st.integers(0, 5), max_size=6))
def test_the_longest_and_latest_agreement_comes_first(text: list[int], path: list[int]) -> None:
    context = text + path
    found = cache_of(text).guesses(path)
    matches = [(agreement(text, end, context), end) for end in range(1, len(text) + 1)]
    latest = [end for number, end in matches if number][
        -MAX_CONTINUATIONS - 1 :
    ]  # of a single token no more are sought
    looked_at = [(number, end) for number, end in matches if (number > 1 or end in latest) and end < len(text)]
    expected: dict[int, int] = {}
    for number, end in sorted(looked_at, reverse=True):
        expected.setdefault(text[end], number)
    assert [token_id for token_id, _ in found] == list(expected)[:MAX_CONTINUATIONS]
    rest = 1.0
    for place, (token_id, share) in enumerate(found):
        assert share == pytest.approx(rest * SHARES[min(expected[token_id], len(SHARES) - 1)] / 2**place)
        rest -= share
    assert 0 < rest <= 1


@settings(deadline=None, max_examples=200)
@given(text=texts, more=texts, path=st.lists(st.integers(0, 4), max_size=3))
def test_what_was_committed_bit_by_bit_is_what_was_opened(text: list[int], more: list[int], path: list[int]) -> None:
    cache = cache_of([1, 2, 3])
    cache.open(text)
    cache.guesses(path)
    for token_id in more:
        cache.commit([token_id])
    assert cache.length == len(text) + len(more)
    assert cache.guesses(path) == cache_of(text + more).guesses(path)
    assert cache.guesses(path) == cache.guesses(path)  # a path is not taken for committed


@settings(deadline=None, max_examples=300)
@given(text=texts, min_match=st.integers(1, 3), max_tokens=st.integers(0, 9))
def test_a_continuation_is_what_prompt_lookup_proposes(text: list[int], min_match: int, max_tokens: int) -> None:
    matches = [(agreement(text, end, text), end) for end in range(1, len(text))]
    number, end = max(matches, default=(0, 0))  # the longest, of equal ones the latest
    expected = [text[end + offset % (len(text) - end)] for offset in range(max_tokens if number >= min_match else 0)]
    assert cache_of(text, min_match).continuation(max_tokens) == tuple(expected)
    drafter = NgramDrafter(min_match, MAX_MATCH)
    drafter.open(text or [9], 100)
    assert drafter.propose(max_tokens) == tuple(expected)


def test_a_loop_goes_on() -> None:
    assert cache_of([7, 1, 2, 3, 1, 2]).continuation(7) == (3, 1, 2, 3, 1, 2, 3)
    assert cache_of([7, 1, 2, 3, 1, 2], min_match=3).continuation(7) == ()


def test_long_texts_cost_a_bounded_number_of_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    compare = NgramCache._agreement

    def counted(self: NgramCache, end: int, suffix: Sequence[int]) -> int:
        calls.append(end)
        return compare(self, end, suffix)

    monkeypatch.setattr(NgramCache, "_agreement", counted)
    cache = cache_of([5] * 4000)
    assert cache.guesses((5, 5))[0][0] == 5
    assert len(calls) < 50
    assert min(calls) > 3900  # the latest


@pytest.mark.parametrize("lengths", [(0, 3), (4, 3)])
def test_lengths_that_do_not_fit_are_refused(lengths: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="do not fit together"):
        NgramCache(*lengths)
