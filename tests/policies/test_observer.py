"""What a policy is shown, as a target tells it."""

from __future__ import annotations

from amusd.policies.observer import Observer
from amusd.protocol.target_session import TargetSession


def session() -> TargetSession[bytes]:
    return TargetSession(sequence_id=1, prompt=(1,), max_length=9, vocab_size=4, max_lookahead=4)


def passed(observer: Observer, start_ns: int, end_ns: int, num_accepted: int = 0) -> None:
    observer.passed(
        start_ns,
        end_ns,
        num_candidates=2,
        num_judged=2,
        num_accepted=num_accepted,
        num_tokens=num_accepted + 1,
        foreseen=False,
    )


def test_a_view_before_anything_is_known() -> None:
    view = Observer().view(session(), max_candidates=3, waited_ns=2_000_000)
    assert (view.num_candidates, view.max_candidates, view.waited_seconds) == (0, 3, 0.002)
    assert (view.pass_seconds, view.tokens_per_second, view.candidate_seconds) == (0, 0, 0)
    assert view.path_chance == 1


def test_passes_and_what_lies_between_them_are_told_apart() -> None:
    observer = Observer()
    observer.open("a", has_tree=False)
    passed(observer, 0, 10_000_000)
    passed(observer, 30_000_000, 40_000_000)
    view = observer.view(session(), max_candidates=3, waited_ns=0)
    assert view.pass_seconds == 0.01
    assert round(view.tokens_per_second, 9) == round(1.9 / (0.9 * 0.01 + 0.03), 9)  # the first pass weighs less


def test_time_between_two_answers_is_nobodys() -> None:
    observer = Observer()
    for start_ns in (0, 10**12):
        observer.open("a", has_tree=False)
        passed(observer, start_ns, start_ns + 10_000_000)
    assert observer.view(session(), max_candidates=3, waited_ns=0).tokens_per_second > 99


def test_each_drafter_with_and_without_trees_is_known_for_itself() -> None:
    observer = Observer()
    observer.open("a", has_tree=True)
    for _ in range(50):
        passed(observer, 0, 1000, num_accepted=2)
    good = observer.view(session(), max_candidates=3, waited_ns=0).acceptance
    for drafter, has_tree in (("a", False), ("b", True)):
        observer.open(drafter, has_tree=has_tree)
        assert observer.view(session(), max_candidates=3, waited_ns=0).acceptance == 0.5
    observer.open("a", has_tree=True)
    assert observer.view(session(), max_candidates=3, waited_ns=0).acceptance == good > 0.9


def test_a_wait_that_brought_nothing_counts() -> None:
    observer = Observer()
    observer.open("a", has_tree=False)
    passed(observer, 0, 1000)
    observer.waited(5_000_000, num_before=0, num_after=0)
    assert observer.view(session(), max_candidates=3, waited_ns=0).candidate_seconds == 0.005
    observer.waited(3_000_000, num_before=0, num_after=1)
    assert 0.005 < observer.view(session(), max_candidates=3, waited_ns=0).candidate_seconds < 0.0075
