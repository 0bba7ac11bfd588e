"""Hostile messages are refused, and do nothing else to the sessions of both sides."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from protocol.fuzz import MAX_LENGTH, NONCE, OPENING, PROMPT, TREE_OPENING, VOCAB_SIZE, fuzz
from protocol.sessions import hash_of

from amusd.errors import PeerProtocolError
from amusd.protocol.candidate_tree import MAX_NUMBERS
from amusd.protocol.draft_session import DraftSession
from amusd.protocol.messages import CERTAINTY, MAX_EPOCH, MAX_FAN_OUT, MAX_TOKENS, Candidate, Open, Verdict
from amusd.protocol.target_session import TargetSession
from amusd.protocol.wire import decode, encode

CHAIN = Candidate(1, 1, 4, hash_of(PROMPT), 1, (0, 1), (5, 6), (), more=True)
TREE = replace(CHAIN, weights=(CERTAINTY, 1))


def target(fan_out: int = 1) -> TargetSession:
    session = TargetSession(sequence_id=1, prompt=PROMPT, max_length=MAX_LENGTH, vocab_size=VOCAB_SIZE, fan_out=fan_out)
    session.attach(1)
    return session


def test_thousands_of_hostile_messages_are_refused_or_harmless() -> None:
    outcomes = fuzz(6_000, seed=1)
    assert outcomes["refused"] > 500
    assert outcomes["taken"] > 1_000


HOSTILE = {
    "an id beyond the vocabulary": replace(TREE, token_ids=(5, VOCAB_SIZE)),
    "a base that is not committed": replace(TREE, base=2**62),
    "a base inside the prompt": replace(TREE, base=3),
    "a parent that comes later": replace(TREE, parents=(0, 2)),
    "a number that is none": replace(TREE, first=0),
    "a weight above certainty": replace(TREE, weights=(1, CERTAINTY + 1)),
    "a weight too few": replace(TREE, weights=(1,)),
    "no weights": CHAIN,
    "more nodes than a tree has": replace(
        TREE, parents=(0,) * (MAX_NUMBERS + 1), token_ids=(5,) * (MAX_NUMBERS + 1), weights=(1,) * (MAX_NUMBERS + 1)
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_candidates_are_refused_and_honest_ones_taken_after_them(name: str) -> None:
    session = target(fan_out=2)
    with pytest.raises(PeerProtocolError):
        session.receive(HOSTILE[name])
    assert session.num_candidates == 0
    assert session.receive(TREE) == "taken"
    assert session.begin(2).candidates == (5, 6)


def test_a_node_offered_for_ever_under_new_numbers_takes_no_more_memory() -> None:
    session, number = target(fan_out=2), 1
    same = replace(TREE, parents=(0,) * 1000, token_ids=(5,) * 1000, weights=(1,) * 1000)
    for _ in range(50):
        session.receive(replace(same, first=number))
        number += 1000
    assert len(session._tree.nodes) <= MAX_NUMBERS
    session.begin(0)
    session.commit((5,), 0)
    assert session.committed[-1] == 5


HOSTILE_OPENINGS = {
    "no tokens": {"token_ids": ()},
    "no room": {"max_length": 3},
    "more room than any context": {"max_length": MAX_TOKENS + 1},
    "no run-ahead": {"max_lookahead": 0},
    "no tokens in a message": {"tokens_per_message": 0},
    "a fan without end": {"fan_out": MAX_FAN_OUT + 1},
    "rows without end": {"fan_out": 1, "rows_per_step": 2**63 - 1},
    "a tree without rows": {"rows_per_step": 0},
    "no candidates behind a token": {"fan_out": 0},
}


@pytest.mark.parametrize("name", HOSTILE_OPENINGS)
def test_a_hostile_opening_is_refused(name: str) -> None:
    opening: Open = replace(OPENING, **HOSTILE_OPENINGS[name])  # type: ignore[arg-type]  # any field
    with pytest.raises((PeerProtocolError, ValueError)):
        DraftSession(decode(encode(opening, NONCE))[2])  # type: ignore[arg-type]


@pytest.mark.parametrize("opening", [OPENING, TREE_OPENING], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(1, 1, MAX_EPOCH + 1, 4, (5,)),
        Verdict(1, 1, 0, 5, (5,)),
        Verdict(1, 1, 0, 4, (5,) * MAX_LENGTH),
        Verdict(1, 1, 0, 2**62, (5,)),
        Verdict(1, 1, 0, 3, (9, 5)),
    ],
)
def test_a_hostile_verdict_is_refused_and_an_honest_one_taken_after_it(opening: Open, verdict: Verdict) -> None:
    session = DraftSession(opening)
    with pytest.raises(PeerProtocolError):
        session.receive(verdict)
    assert session.base == 4
    assert session.receive(Verdict(1, 1, 0, 4, (5,))) is not None
    assert session.base == 5
