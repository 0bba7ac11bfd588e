"""Wall time and its parts: they add up, and agree with what the workers counted themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tracing.runs import Run, made

from amusd.tracing.accounting import DRAFT_PARTS, TARGET_PARTS, accounts, draft_account, target_account, time_fractions
from amusd.tracing.drafted import Fate, judge_steps
from amusd.tracing.events import Event

CLOSE = 0.01
"""Parts add up to the wall time within this share."""


@st.composite
def target_events(draw: st.DrawFn) -> list[Event]:
    """A sequence of passes and waits with gaps of any length between them."""
    start = now = draw(st.integers(0, 10**15))
    events = []
    for name in ["target_prefill", *draw(st.lists(st.sampled_from(["target_pass", "target_wait"]), max_size=12))]:
        now += draw(st.integers(0, 10**7))
        end = now + draw(st.integers(0, 10**8))
        room = draw(st.integers(0, 8))
        fields = {"num_candidates": draw(st.integers(0, room)), "max_candidates": room}
        events.append(made(name, now, end, 1, **fields if name == "target_pass" else {}))
        now = end
    end = now + draw(st.integers(0, 10**7))
    return [*events, made("sequence", start, end, 1)]


@given(events=target_events())
def test_the_targets_parts_add_up_to_its_wall_time(events: list[Event]) -> None:
    account = target_account(events)
    assert account is not None
    assert set(account.parts) == set(TARGET_PARTS)
    assert sum(account.parts.values()) == account.wall_ns
    assert min(account.parts.values()) >= 0
    passes = [event for event in events if event.name == "target_pass"]
    in_passes = sum(account.parts[name] for name in TARGET_PARTS if "passes" in name)
    assert in_passes == sum(event.duration_ns for event in passes)
    without = sum(event.duration_ns for event in passes if event.num_candidates == 0)
    assert account.parts["passes_without_candidates"] == without


@given(
    num_tokens=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    gaps=st.lists(st.integers(0, 1000), min_size=20, max_size=20),
    accepted=st.integers(0, 40),
)
def test_the_drafts_parts_add_up_and_steps_are_shared_out(
    num_tokens: list[int], gaps: list[int], accepted: int
) -> None:
    now, length = gaps[0], 5
    draft = [made("draft_prefill", now, now + 10, 1, num_tokens=length)]
    now += 10
    for count, gap in zip(num_tokens, gaps[1:], strict=False):
        length += count
        draft.append(made("draft_step", now + gap, now + gap + 100, 1, num_tokens=count, length=length))
        now += gap + 100
    draft.append(made("sequence", 0, now + 7, 1))
    accepted = min(accepted, length - 5)
    target = [
        made("target_pass", 0, 1, committed_length=5 + accepted + 1, num_tokens=accepted + 1, num_accepted=accepted)
    ]
    account = draft_account(draft, target)
    assert account is not None
    assert set(account.parts) == set(DRAFT_PARTS)
    assert sum(account.parts.values()) == account.wall_ns
    steps = judge_steps(draft, target)
    assert sum(step.count(Fate.ACCEPTED) for step in steps) == accepted
    shares = sum(100 * step.count(Fate.ACCEPTED) // max(1, len(step.fates)) for step in steps)
    assert account.parts["accepted_steps"] == shares


def test_a_real_runs_parts_add_up_and_agree_with_the_metrics(real_run: Run) -> None:
    for answer in real_run.answers:
        part = real_run.timeline.only(answer.sequence_id)
        found = accounts(part.target, part.draft)
        metrics = answer.metrics
        for account in found.values():
            assert sum(account.parts.values()) == pytest.approx(account.wall_ns, rel=CLOSE)
        target = found["target"]
        assert target.wall_ns == pytest.approx(metrics.total_ns, rel=CLOSE)
        assert sum(target.parts[name] for name in TARGET_PARTS if "passes" in name) == metrics.pass_ns
        assert target.parts["waits"] == metrics.wait_ns
        assert target.parts["prefill"] == metrics.prefill_ns
        assert ("draft" in found) == (metrics.draft is not None)
        if metrics.draft is not None:
            draft = found["draft"]
            # The sequence is open a little longer than until its last report.
            assert metrics.draft.open_ns <= draft.wall_ns < metrics.draft.open_ns + 100_000_000
            busy = sum(part for name, part in draft.parts.items() if name not in ("waits", "host"))
            assert busy == metrics.draft.busy_ns
            assert draft.parts["waits"] == metrics.draft.wait_ns
            assert draft.parts["accepted_steps"] > 0
            assert draft.parts["wasted_steps"] > 0


def test_every_accepted_candidate_is_found_among_the_drafted_tokens(real_run: Run) -> None:
    for answer in real_run.answers[1:]:
        part = real_run.timeline.only(answer.sequence_id)
        steps = judge_steps(part.draft, part.target)
        metrics = answer.metrics
        assert metrics.draft is not None
        assert sum(step.count(Fate.ACCEPTED) for step in steps) == metrics.num_accepted
        assert sum(len(step.fates) for step in steps) == metrics.draft.num_drafted


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
    fates = [step.fates for step in judge_steps(draft, target)]
    assert fates == [(Fate.OVERTAKEN, Fate.ACCEPTED, Fate.WASTED), (Fate.WASTED,)]


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
        made("sequence", 6, 10, 1),
    ]
    target = [made("target_pass", 0, 8, 1, committed_length=5, num_tokens=1, num_accepted=1)]
    assert [step.fates for step in judge_steps(draft, target)] == [(Fate.WASTED, Fate.WASTED), (Fate.ACCEPTED,)]
    account = draft_account(draft, target)
    assert account is not None
    assert account.wall_ns == sum(account.parts.values()) == 10


def test_fractions_of_several_sequences_add_up_to_one(real_run: Run) -> None:
    fractions = time_fractions(real_run.timeline, {2, 3, 4})
    for role in ("target", "draft"):
        parts = fractions[role]
        assert parts is not None
        assert sum(parts.values()) == pytest.approx(1, rel=CLOSE)
    assert time_fractions(real_run.timeline, {1})["draft"] is None
