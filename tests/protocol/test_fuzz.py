"""Hostile frames are refused and counted, and do nothing else, to the decoder and to the sessions of both sides."""

from __future__ import annotations

import dataclasses
import sys
import tracemalloc

import pytest
from protocol.fuzz import MAX_LENGTH, OPENING, PROMPT, TREE_OPENING, VOCAB_SIZE, fuzz

from amusd.errors import PeerProtocolError
from amusd.protocol.draft_session import DraftSession
from amusd.protocol.drafting import MAX_FAN_OUT
from amusd.protocol.messages import CERTAINTY, MAX_EPOCH, Candidate, Open, Prepared, Verdict
from amusd.protocol.prefix_hash import EMPTY, extend
from amusd.protocol.target_session import Reception, TargetSession
from amusd.protocol.tree_draft_session import TreeDraftSession
from amusd.protocol.tree_target_session import MAX_NUMBERS, TreeTargetSession
from amusd.protocol.wire import MAX_TOKENS, encode

PROMPT_HASH = EMPTY
for token_id in PROMPT:
    PROMPT_HASH = extend(PROMPT_HASH, token_id)
CANDIDATE = Candidate(1, 1, 0, 4, 4, (5, 6), PROMPT_HASH, more=True)
PREPARED = Prepared(1, 1, 4, 4, PROMPT_HASH, 1, (0, 1), (5, 6), (CERTAINTY, 1), more=True)


def target() -> TargetSession[bytes]:
    session = TargetSession[bytes](
        sequence_id=1, prompt=PROMPT, max_length=MAX_LENGTH, vocab_size=VOCAB_SIZE, max_lookahead=16
    )
    session.attach(1)
    return session


def tree_target() -> TreeTargetSession:
    session = TreeTargetSession(
        sequence_id=1, prompt=PROMPT, max_length=MAX_LENGTH, vocab_size=VOCAB_SIZE, max_lookahead=16
    )
    session.attach(1)
    return session


def test_thousands_of_hostile_frames_are_refused_or_harmless() -> None:
    outcomes = fuzz(6_000, seed=1)
    assert outcomes["undecodable"] > 1_000
    assert outcomes["refused"] > 500
    assert outcomes["taken"] > 1_000


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_million_hostile_frames_are_refused_or_harmless_in_bounded_memory() -> None:
    resource = pytest.importorskip("resource")
    fuzz(10_000, seed=0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(fuzz(1_000_000, seed=20).values()) > 1_000_000
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 50_000 * (1024 if sys.platform == "darwin" else 1)  # kilobytes, on macOS bytes


HOSTILE_CANDIDATES = {
    "an id beyond the vocabulary": dataclasses.replace(CANDIDATE, token_ids=(VOCAB_SIZE,)),
    "more than the run-ahead": dataclasses.replace(CANDIDATE, token_ids=(5,) * 17),
    "a base that is not committed": dataclasses.replace(CANDIDATE, base=5),
    "a base inside the prompt": dataclasses.replace(CANDIDATE, base=3),
    "a start before its base": dataclasses.replace(CANDIDATE, start=3),
    "a start beyond all tokens": dataclasses.replace(CANDIDATE, start=2**63 - 1),
    "an epoch that has no next": dataclasses.replace(CANDIDATE, epoch=2**63 - 1),
    "an epoch too high to count": dataclasses.replace(CANDIDATE, epoch=MAX_EPOCH + 1),
    "rows that nobody asked for": (CANDIDATE, (b"",)),
}


@pytest.mark.parametrize("name", HOSTILE_CANDIDATES)
def test_a_hostile_candidate_is_refused_and_an_honest_one_taken_after_it(name: str) -> None:
    session, hostile = target(), HOSTILE_CANDIDATES[name]
    with pytest.raises(PeerProtocolError):
        session.receive(*hostile) if isinstance(hostile, tuple) else session.receive(hostile)
    assert session.num_candidates == 0
    assert session.receive(CANDIDATE) is Reception.TAKEN
    assert session.begin(2).candidates == (5, 6)


def test_the_floor_above_any_epoch_that_is_taken_fits_a_frame() -> None:
    session = target()
    gap = dataclasses.replace(CANDIDATE, epoch=MAX_EPOCH, start=9)
    assert session.receive(gap) is Reception.GAP
    assert session.epoch_floor == MAX_EPOCH + 1
    encode(session.verdict(), 1)


HOSTILE_NODES = {
    "an id beyond the vocabulary": dataclasses.replace(PREPARED, token_ids=(5, VOCAB_SIZE)),
    "a root beyond its base": dataclasses.replace(PREPARED, root=5),
    "a base that is not committed": dataclasses.replace(PREPARED, base=2**62),
    "a parent that comes later": dataclasses.replace(PREPARED, parents=(0, 2)),
    "a number that is none": dataclasses.replace(PREPARED, first=0),
    "a weight above certainty": dataclasses.replace(PREPARED, weights=(1, CERTAINTY + 1)),
    "a weight too few": dataclasses.replace(PREPARED, weights=(1,)),
    "more nodes than a tree has": dataclasses.replace(
        PREPARED, parents=(0,) * (MAX_NUMBERS + 1), token_ids=(5,) * (MAX_NUMBERS + 1), weights=(1,) * (MAX_NUMBERS + 1)
    ),
}


@pytest.mark.parametrize("name", HOSTILE_NODES)
def test_hostile_nodes_are_refused_and_honest_ones_taken_after_them(name: str) -> None:
    session = tree_target()
    with pytest.raises(PeerProtocolError):
        session.receive(HOSTILE_NODES[name])
    assert session.num_nodes == 0
    assert session.receive(PREPARED) is Reception.TAKEN
    assert session.begin(2).candidates == (5, 6)


def test_a_node_offered_for_ever_under_new_numbers_takes_no_more_memory() -> None:
    session, number = tree_target(), 1
    same = dataclasses.replace(PREPARED, parents=(0,) * 1000, token_ids=(5,) * 1000, weights=(1,) * 1000)
    tracemalloc.start()
    try:
        for _ in range(50):
            session.receive(dataclasses.replace(same, first=number))
            number += 1000
        assert len(session._nodes) <= MAX_NUMBERS
        assert tracemalloc.get_traced_memory()[0] < 5_000_000
    finally:
        tracemalloc.stop()
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
    "a tree without rows": {"fan_out": 1, "rows_per_step": 0},
}


@pytest.mark.parametrize("name", HOSTILE_OPENINGS)
def test_a_hostile_opening_is_refused(name: str) -> None:
    opening: Open = dataclasses.replace(OPENING, **HOSTILE_OPENINGS[name])  # type: ignore[arg-type]  # any field
    with pytest.raises(PeerProtocolError):
        (TreeDraftSession if opening.fan_out else DraftSession)(opening)


@pytest.mark.parametrize("session_type", [DraftSession, TreeDraftSession])
@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(1, 1, MAX_EPOCH + 1, 4, (5,), 0),
        Verdict(1, 1, 2**63 - 1, 4, (), 0),
        Verdict(1, 1, 0, 5, (5,), 0),
        Verdict(1, 1, 0, 4, (5,) * MAX_LENGTH, 0),
        Verdict(1, 1, 0, 2**62, (5,), 0),
        Verdict(1, 1, 0, 3, (9, 5), 0),
    ],
)
def test_a_hostile_verdict_is_refused_and_an_honest_one_taken_after_it(
    session_type: type[DraftSession | TreeDraftSession], verdict: Verdict
) -> None:
    session = session_type(TREE_OPENING)
    with pytest.raises(PeerProtocolError):
        session.preview(verdict)
    assert session.base == 4
    change = session.preview(Verdict(1, 1, 0, 4, (5,), 0))
    assert change is not None
    assert change.committed_length == 5
