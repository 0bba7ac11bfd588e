"""What became of each drafted token and each message, by the events of both workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tracing.runs import made

from amusd.tracing.events import Event
from amusd.tracing.timeline import Timeline, match_messages


def fates(target: list[Event], draft: list[Event]) -> list[tuple[int, ...]]:
    """How many tokens of each step were accepted, overtaken, wasted."""
    return [tuple(found.values()) for _, found in Timeline(target, draft).steps()]


def test_rolled_back_tokens_are_wasted_and_kept_ones_may_be_overtaken() -> None:
    draft = [
        made("draft_prefill", 0, 1, 1, num_tokens=4),
        made("draft_step", 1, 2, 1, num_tokens=3, length=7),  # positions 4, 5, 6
        made("advance", 2, 3, 1, num_discarded=0, committed_length=5),
        made("rollback", 3, 4, 1, num_discarded=1, committed_length=7),  # 6 was wrong
        made("draft_step", 4, 5, 1, num_tokens=1, length=8),
    ]
    target = [
        made("target_pass", 0, 1, 1, committed_length=5, num_tokens=1, num_accepted=0),
        made("target_pass", 1, 2, 1, committed_length=7, num_tokens=2, num_accepted=1),
    ]
    assert fates(target, draft) == [(1, 1, 1), (0, 0, 1)]


@pytest.mark.parametrize("fan_out", [1, 2])
def test_a_draft_that_came_in_the_place_of_a_lost_one_is_judged_by_its_own_steps(fan_out: int) -> None:
    kept = {"kept_steps": [1]} if fan_out > 1 else {}
    draft = [
        made("draft_prefill", 0, 1, 1, num_tokens=4, fan_out=fan_out),
        made("draft_step", 1, 4, 1, num_tokens=2, length=6),  # positions 4 and 5: lost
        made("sequence", 0, 4, 1),
        made("draft_prefill", 6, 7, 1, num_tokens=4, fan_out=fan_out),
        made("draft_step", 7, 8, 1, num_tokens=1, length=5),  # position 4 anew
        made("advance", 8, 9, 1, num_discarded=0, num_adopted=0, committed_length=5, **kept),
    ]
    target = [made("target_pass", 0, 8, 1, committed_length=5, num_tokens=1, num_accepted=1)]
    assert fates(target, draft) == [(0, 0, 2), (1, 0, 0)]


def test_a_token_of_a_tree_counts_in_its_own_step_and_what_was_looked_up_in_none() -> None:
    draft = [
        made("draft_prefill", 0, 1, 1, num_tokens=4, fan_out=2),
        made("draft_step", 1, 2, 1, num_tokens=1, length=7),
        made("draft_step", 2, 3, 1, num_tokens=3, length=13),
        made("advance", 3, 4, 1, num_discarded=0, num_adopted=0, committed_length=8, kept_steps=[1, 2, 0, 2]),
        made("draft_step", 4, 5, 1, num_tokens=2, length=10),
        made("rollback", 5, 6, 1, num_discarded=2, num_adopted=1, committed_length=10, kept_steps=[3]),
    ]
    target = [
        made("target_pass", 0, 1, 1, committed_length=8, num_tokens=4, num_accepted=3),
        made("target_pass", 1, 2, 1, committed_length=10, num_tokens=2, num_accepted=1),
    ]
    assert fates(target, draft) == [(1, 0, 0), (1, 1, 1), (1, 0, 1)]


@given(data=st.data(), num_sent=st.integers(0, 12))
def test_lost_messages_do_not_shift_the_others(data: st.DataObject, num_sent: int) -> None:
    sent = [made("send", n, n, 1, message="candidate", start=n) for n in range(num_sent)]
    arrived = [event for event in sent if data.draw(st.booleans())]
    received = [made("receive", e.start_ns + 50, e.end_ns + 50, 1, **e.fields, reception="taken") for e in arrived]
    assert [one for one, _ in match_messages(sent, received)] == arrived
