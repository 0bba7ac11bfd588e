"""The view of a policy, as a target's reports change it."""

from __future__ import annotations

import pytest
from policies.builders import outcome

from amusd.policies.base import TargetView, Verify
from amusd.policies.observer import FIRST_DRAFTING, FIRST_PAUSE, Observer, PassTimes, Switches
from amusd.protocol.messages import CERTAINTY, Candidate
from amusd.protocol.prefix_hash import EMPTY, extend
from amusd.protocol.target_session import TargetSession


def session() -> TargetSession:
    return TargetSession(sequence_id=1, prompt=(1,), max_length=9, vocab_size=4)


def passed(
    observer: Observer,
    start_ns: int = 0,
    end_ns: int = 1000,
    *,
    num_candidates: int = 2,
    num_judged: int | None = None,
    num_sequences: int = 1,
    view: TargetView | None = None,
    sends_verdict: bool = True,
    has_draft: bool = True,
) -> None:
    own = outcome(num_candidates, num_judged=num_judged)
    times = PassTimes(start_ns, end_ns, 1 + num_candidates, num_sequences)
    decision = Verify(num_candidates, sends_verdict=sends_verdict)
    observer.on_pass(view or seen_by(observer), decision, times, own, has_draft=has_draft)


ALLOWED = 0.012
"""Seconds that the policy allows a wait."""


def seen_by(observer: Observer, decoding: TargetSession | None = None) -> TargetView:
    return observer.view(decoding or session(), max_candidates=3, waited_ns=0)


def test_a_draft_is_silent_from_a_wait_in_vain_to_its_next_candidate() -> None:
    """A stall of the machine costs one wait, and does not count as the time of a candidate."""
    observer = Observer()
    tree = TargetSession(sequence_id=1, prompt=(1,), max_length=9, vocab_size=4, fan_out=2)
    tree.attach(1)

    def view() -> TargetView:
        return seen_by(observer, tree)

    observer.open("a", has_tree=True)
    for _ in range(20):
        passed(observer, 0, 40_000_000)
        observer.on_wait(4_000_000, ALLOWED, num_before=0, num_after=1)
        observer.on_wait(2_000_000, ALLOWED, num_before=1, num_after=2)
    assert not view().waited_in_vain
    observer.on_wait(5_000_000, ALLOWED, num_before=0, num_after=0)  # something else has come
    assert not view().waited_in_vain
    before = view()
    assert before.longest_wait == pytest.approx(0.012, rel=0.1)
    observer.on_wait(round(1e9 * ALLOWED), ALLOWED, num_before=0, num_after=0)
    assert view().waited_in_vain
    assert view().candidate_seconds < 1.5 * before.candidate_seconds
    passed(observer, 0, 40_000_000)
    assert view().waited_in_vain
    tree.receive(Candidate(1, 1, 1, extend(EMPTY, 1), 1, (0,), (2,), (CERTAINTY // 2,), more=True))
    assert not view().waited_in_vain
    observer.on_wait(round(1e9 * ALLOWED), ALLOWED, num_before=1, num_after=1)
    assert view().waited_in_vain, "there is one, and no further one came"
    passed(observer, 0, 40_000_000)
    assert not view().waited_in_vain, "it has been heard since the pass before"
    observer.on_wait(40_000_000, ALLOWED, num_before=1, num_after=1)
    assert view().waited_in_vain
    observer.open("a", has_tree=True)
    assert not view().waited_in_vain
    observer.on_wait(3_000_000, 0.003, num_before=1, num_after=1)
    assert view().waited_in_vain, "the policy allowed no more"
    observer.open("a", has_tree=True)
    tree.detach()
    tree.attach(2)
    observer.on_draft_joined()
    passed(observer, 0, 40_000_000)
    assert view().waited_in_vain, "it has the whole answer to take in"
    tree.receive(Candidate(1, 2, 1, extend(EMPTY, 1), 1, (0,), (2,), (CERTAINTY // 2,), more=True))
    assert not view().waited_in_vain


def test_a_wait_counts_once_whatever_else_comes_amid_it() -> None:
    observer = Observer()
    observer.open("a", has_tree=True)
    observer.on_step(4_000_000)
    for _ in range(50):
        before = seen_by(observer).candidate_seconds
        observer.on_wait(1_000_000, ALLOWED, num_before=0, num_after=0)
        assert seen_by(observer).candidate_seconds == before
        observer.on_wait(7_000_000, ALLOWED, num_before=0, num_after=1)
    assert seen_by(observer).candidate_seconds == pytest.approx(0.008, rel=0.02)
    observer.on_wait(7_000_000, ALLOWED, num_before=0, num_after=0)
    passed(observer)
    assert seen_by(observer).candidate_seconds > 0.008, "it was in vain"


def test_nothing_can_come_from_a_draft_that_was_told_nothing() -> None:
    observer = Observer()

    def can_grow() -> bool:
        decoding = session()
        decoding.attach(1)
        return seen_by(observer, decoding).can_grow

    observer.open("a", has_tree=False)
    passed(observer, num_candidates=0, sends_verdict=False)
    assert not can_grow()
    passed(observer, num_candidates=0)
    assert can_grow()
    passed(observer, num_candidates=0, sends_verdict=False)
    observer.open("a", has_tree=False)  # an Open tells it all
    assert can_grow()


def test_time_between_two_answers_is_nobodys() -> None:
    observer = Observer()
    for start_ns in (0, 10**12):
        observer.open("a", has_tree=False)
        passed(observer, start_ns, start_ns + 10_000_000)
    assert seen_by(observer).tokens_per_second > 99


def test_a_pass_that_was_held_up_does_not_make_rows_dear() -> None:
    def row_seconds(slow_ns: int) -> float:
        observer = Observer()
        observer.open("a", has_tree=False)
        for _ in range(5):
            passed(observer, 0, 1_000_000, num_candidates=0)
        passed(observer, 0, slow_ns, num_candidates=7, num_judged=0)
        return seen_by(observer).row_seconds

    assert row_seconds(8_000_000) == pytest.approx(0.001, rel=0.01)
    assert row_seconds(800_000_000) == 0


def test_processes_that_were_stopped_amid_a_pass_go_on_drafting() -> None:
    observer, now_ns, num_paused = Observer(), 0, 0
    observer.open("a", has_tree=False)
    for number in range(2000):
        view = seen_by(observer)
        num_paused += not view.drafting_pays
        start_ns, now_ns = now_ns, now_ns + (3600 * 10**9 if number == 10 else 10**7)
        drafts = view.drafting_pays
        own, times = outcome(2 * drafts, 2 * drafts), PassTimes(start_ns, now_ns, 3)
        observer.on_pass(view, Verify(2, sends_verdict=drafts), times, own, has_draft=True)
    assert num_paused <= FIRST_PAUSE
    assert view.pass_seconds == pytest.approx(0.01, rel=0.1)
    assert view.tokens_per_second > 100


@pytest.mark.parametrize("has_draft", [True, False])
def test_passes_without_a_draft_say_nothing_of_what_drafting_brings(has_draft: bool) -> None:
    observer = Observer()
    observer.open("a", has_tree=False)
    for number in range(50):
        start_ns = number * 1_000_000
        passed(observer, start_ns, start_ns + 900_000, num_candidates=0, has_draft=has_draft)
        if not seen_by(observer).drafting_pays:
            break
    assert seen_by(observer).drafting_pays != has_draft


def test_whether_drafting_pays_is_found_by_all_sequences_of_a_pass_together() -> None:
    """A pass has one time for all, so a rest of one sequence would be measured with candidates of the others."""
    switches: Switches = {}
    observers = [Observer(switches) for _ in range(4)]
    for observer in observers:
        observer.open("a", has_tree=True)
    for number in range(FIRST_DRAFTING):
        for observer in observers:
            assert seen_by(observer).drafting_pays
            passed(observer, number * 10**7, (number + 1) * 10**7, num_judged=0, num_sequences=4)
    assert not any(seen_by(observer).drafting_pays for observer in observers)
    alone = Observer(switches)
    alone.open("a", has_tree=True)
    assert seen_by(alone).drafting_pays, "another question where it is alone"
