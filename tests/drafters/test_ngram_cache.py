"""The n-gram cache against brute force, which compares every place of the text with its end, token by token.

Drafters with this cache: chains, trees, and their memory of earlier answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amusd.config.engine import MAX_MATCH
from amusd.drafters.ngram import CHANCES, MAX_CONTINUATIONS, WEIGHTS, EarlierAnswers, NgramCache, NgramDrafter
from amusd.protocol.draft_tree import Node
from amusd.protocol.messages import Open, Verdict
from amusd.runtime.draft_worker import draft_step
from amusd.runtime.rollback import RollbackManager

texts = st.lists(st.integers(0, 4), max_size=30)


def cache_of(token_ids: Sequence[int], min_lookup: int = 1) -> NgramCache:
    cache = NgramCache(min_lookup)
    cache.open(token_ids)
    return cache


def agreement(text: Sequence[int], end: int, context: Sequence[int]) -> int:
    longest = min(end, len(context), MAX_MATCH)
    return max(n for n in range(longest + 1) if list(text[end - n : end]) == list(context[len(context) - n :]))


@settings(max_examples=100)
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
    best = list(expected.items())[:MAX_CONTINUATIONS]
    assert found == [(token_id, *WEIGHTS[min(number, len(WEIGHTS)) - 1]) for token_id, number in best]


@settings(max_examples=100)
@given(text=texts, path=st.lists(st.integers(0, 4), max_size=6), least=st.integers(1, 3), wanted=st.integers(0, 9))
def test_a_continuation_is_what_prompt_lookup_proposes(
    text: list[int], path: list[int], least: int, wanted: int
) -> None:
    whole = text + path
    matches = [(agreement(text, end, whole), end) for end in range(1, len(text))]
    number, end = max(matches, default=(0, 0))  # the longest, of equal ones the latest
    expected = [whole[end + offset % (len(whole) - end)] for offset in range(wanted if number >= least else 0)]
    assert cache_of(text, least).continuation(wanted, path)[0] == tuple(expected)
    drafter = NgramDrafter(least)
    drafter.open(text or [9], 100)
    assert drafter.propose(path, wanted) == tuple(expected)


# Trees


def test_a_tree_has_the_continuations_by_their_chances() -> None:
    drafter = NgramDrafter(1)
    root = Node(None, 2, 6, 1.0, 1.0)
    drafter.open([1, 2, 7, 3, 2, 8, 1, 2], 100, fan_out=2)
    ((first, second),) = drafter.expand(root, [root])
    assert first == (7, pytest.approx(CHANCES[2]))  # two tokens agree there
    assert second == (8, pytest.approx((1 - CHANCES[2]) * CHANCES[1] / 2))
    assert drafter.look_up() == ((7, 3, 2, 8, 1, 2, 7, 3), CHANCES[2])
    child = Node(root, 7, 7, 0.5, 0.5)
    assert drafter.expand(root, [child]) == [[(3, pytest.approx(CHANCES[3]))]]
    only_longer = NgramDrafter(2)
    only_longer.open([1, 2, 7, 3, 2, 8, 1, 2], 100, fan_out=2)
    assert [token_id for token_id, _ in only_longer.expand(root, [root])[0]] == [7]


# Earlier answers


def proposed(drafter: NgramDrafter, prompt: Sequence[int], fan_out: int) -> tuple[int, ...]:
    drafter.open(prompt, 400, fan_out)
    return tuple(drafter.propose((), 8) if fan_out == 1 else drafter.look_up()[0])


def answered(drafter: NgramDrafter, prompt: Sequence[int], answer: Sequence[int], fan_out: int = 1) -> None:
    """A whole sequence, its answer in verdicts of three tokens, with work for nothing between them."""
    rows = 4 if fan_out > 1 else 1
    manager = RollbackManager(
        Open(1, 1, tuple(prompt), 400, "ngram", 8, 1, fan_out=fan_out, rows_per_step=rows), drafter
    )
    manager.open()
    for start in range(0, len(answer), 3):
        draft_step([manager])
        manager.apply(Verdict(1, 1, 0, manager.session.base, tuple(answer[start : start + 3])))
    draft_step([manager])
    manager.close()
    manager.close()


@pytest.mark.parametrize(("first", "second"), [(1, 3), (3, 1)])
def test_an_earlier_answer_is_looked_up_by_every_drafter_made_with_it(first: int, second: int) -> None:
    earlier = EarlierAnswers(100)
    answered(NgramDrafter(1, earlier), [50, 51, 52], [10, 11, 12, 13, 14], first)
    other = NgramDrafter(1, earlier)
    assert proposed(other, [60, 52], second) == (10, 11, 12, 13, 14)  # after the last token of the prompt
    assert proposed(other, [12], second) == (13, 14)
    assert proposed(NgramDrafter(1), [12], second) == ()
    assert proposed(other, [12, 9, 12], second) == (9, 12, 9, 12, 9, 12, 9, 12)  # its own text comes first


def test_only_what_was_committed_is_remembered() -> None:
    earlier = EarlierAnswers(100)
    prompt = [1, 2, 3, 4, 5, 6, *range(20, 30), 1, 2]
    answered(NgramDrafter(1, earlier), prompt, [3, 4])  # 5 and 6 were drafted after them
    answered(NgramDrafter(1, earlier), [1, 2, 3], [])
    assert [index.token_ids for index in earlier.indexes] == [[*prompt[-MAX_MATCH:], 3, 4]]


def test_no_more_is_remembered_than_asked_for() -> None:
    earlier = EarlierAnswers(20)
    drafter = NgramDrafter(1, earlier)
    for number in range(1, 40):
        answered(drafter, [1], range(100 * number, 100 * number + number), fan_out=3)
        kept = [token_id for index in earlier.indexes for token_id in index.token_ids]
        assert len(kept) <= 20
        assert kept[-1] == 100 * number + number - 1
