"""The sessions where the model of `model_checking` has no say: counts, hints to the policy, illegal input."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from protocol.sessions import attached, hash_of, hear, judge, nodes_of, offered

from amusd.errors import PeerProtocolError
from amusd.protocol.draft_session import DraftSession
from amusd.protocol.messages import Candidate, Open, Verdict
from amusd.protocol.target_session import TargetSession

PROMPT = (1, 2, 3)
OPENING = Open(1, 1, PROMPT, 20, "test", 6, 1)


def target(**options: bool) -> TargetSession:
    return attached(PROMPT, **options)


def candidate(*tokens: int, first: int = 1, parent: int = 0) -> Candidate:
    parents = (parent, *range(first, first + len(tokens) - 1)) if tokens else ()
    return Candidate(1, 1, len(PROMPT), hash_of(PROMPT), first, parents, tokens, (), more=True)


def grow(session: DraftSession, *tokens: int) -> None:
    session.tree.grow(nodes_of(session), [[(token_id, 1.0)] for token_id in tokens])


def draft(*tail: int) -> DraftSession:
    session = DraftSession(OPENING)
    for token_id in tail:
        grow(session, token_id)
        session.offer()
    return session


def text(session: DraftSession) -> tuple[int, ...]:
    return (*session.committed, *(node.token_id for node in session.tree.root.below()))


def test_a_pass_that_ends_the_answer_has_not_judged_candidates_after_the_end() -> None:
    for ends, num_judged in ((False, 4), (True, 2)):
        session = target()
        session.receive(candidate(4, 5, 6, 7))
        session.begin(6)
        outcome = session.commit((4, 5), 2, ends=ends)
        assert (outcome.num_candidates, outcome.num_judged, outcome.num_accepted) == (4, num_judged, 2)
        assert (outcome.num_tokens, outcome.num_late_accepted) == (2, 0)


# Verdicts, case by case


def test_all_accepted_and_the_next_token_differs() -> None:
    session = target()
    session.receive(candidate(4, 5))
    judge(session, 4, 5, 9, accepted=2)
    assert not session.draft_restarting
    assert session.receive(candidate(6, first=3, parent=2)) == "contradicted"
    assert session.draft_restarting
    session.begin(6)
    assert session.receive(candidate(7, first=4, parent=3)) == "stale"
    assert not session.draft_restarting  # what follows a contradicted token is no news


def test_a_late_candidate_is_judged_in_the_place_of_the_bonus_token() -> None:
    session = target()
    session.receive(candidate(4))
    session.begin(6)
    session.receive(candidate(5, 6, first=2, parent=1))
    assert session.to_judge()[0] == (4, 5)
    session.commit((4, 5), 2)
    assert session.begin(6).candidates == (6,)


def test_a_block_keeps_what_it_was_drawn_from_when_the_draft_is_lost_during_the_pass() -> None:
    session = target(wants_draft_probs=True)
    session.receive(candidate(4, 5), ("row of 4", "row of 5"))
    session.begin(1)
    assert session.to_judge()[1] == ("row of 4", "row of 5")  # a late candidate is judged too
    session.detach()
    assert session.to_judge()[0] == (4,)
    assert session.to_judge()[1] == ("row of 4",)


@pytest.mark.parametrize("of_another", [{"sequence_id": 0}, {"incarnation": 0}], ids=["request", "incarnation"])
def test_a_late_message_of_an_earlier_request_or_incarnation_changes_nothing(of_another: dict[str, int]) -> None:
    session, other = target(), draft(4)
    session.receive(candidate(4))
    before = (session.committed, session.num_candidates, session.verdict())
    assert session.receive(replace(candidate(9), **of_another)) == "stale"
    assert (session.committed, session.num_candidates, session.verdict()) == before
    assert other.receive(replace(Verdict(1, 1, 0, 3, (9,)), **of_another)) is None


def test_a_candidate_from_another_prefix_is_dropped() -> None:
    session = target()
    with pytest.raises(PeerProtocolError, match="another prefix"):
        session.receive(replace(candidate(4), prefix_hash=0))
    assert session.num_candidates == 0


def test_a_draft_that_is_done_says_so_once_and_goes_on_after_a_verdict() -> None:
    other = DraftSession(replace(OPENING, max_lookahead=2))
    for token_id in (4, 5):
        grow(other, token_id)
        assert offered(other).more == (token_id == 4)
    assert other.offer() is None
    assert not other.tree.has_work
    hear(other, Verdict(1, 1, 1, 3, (4,)))
    grow(other, 6)
    assert text(other) == (*PROMPT, 4, 5, 6)
    assert not other.tree.has_work


def test_a_drafter_without_a_proposal_says_so() -> None:
    other = draft()
    grow(other)
    message = offered(other)
    assert (message.token_ids, message.more) == ((), False)
    session = target()
    assert session.may_get_more
    session.receive(message)
    assert not session.may_get_more
    # After the next verdict it drafts again, which is worth a wait, as after a rejection.
    judge(session, 9, accepted=0)
    assert session.may_get_more
    assert session.draft_restarting


# Illegal input


@pytest.mark.parametrize(
    ("tokens", "accepted"),
    [((), 0), ((4, 5, 9, 9), 2), ((9,), 1), ((4,), 2), ((4, 9), 0), ((4, 5, 6, 7), 4)],
    ids=["nothing", "two of its own", "not the candidate", "more than there is", "miscounted", "beyond the block"],
)
def test_an_impossible_commit_is_refused_and_changes_nothing(tokens: tuple[int, ...], accepted: int) -> None:
    session = target()
    session.receive(candidate(4, 5))
    session.begin(6)
    with pytest.raises(AssertionError, match=r"tokens to commit|accepted of|are not the candidates"):
        session.commit(tokens, accepted)
    assert session.committed == PROMPT
    session.commit((4, 5, 9), 2)
    assert session.committed == (*PROMPT, 4, 5, 9)


def test_the_limit_is_kept() -> None:
    session = attached(PROMPT, max_length=5)
    session.receive(candidate(4, 5, 6))
    assert session.begin(6).candidates == (4,)
    with pytest.raises(AssertionError, match="3 tokens to commit, between 1 and 2 allowed"):
        session.commit((4, 5, 6), 2)
    session.commit((4, 5), 2)
    with pytest.raises(AssertionError, match="the sequence is full"):
        session.begin(0)


def test_an_incarnation_must_rise() -> None:
    session = target()
    with pytest.raises(PeerProtocolError):
        session.attach(1)
    session.detach()
    with pytest.raises(PeerProtocolError):
        session.attach(1)
    session.attach(2)
