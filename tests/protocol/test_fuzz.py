"""Hostile messages are refused, and do nothing else to the sessions of both sides."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace
from protocol.sessions import attached, hash_of, nodes_of

from amusd.errors import PeerProtocolError
from amusd.protocol.candidate_tree import MAX_NUMBERS
from amusd.protocol.draft_session import DraftSession
from amusd.protocol.messages import CERTAINTY, MAX_EPOCH, MAX_FAN_OUT, MAX_TOKENS, Candidate, Message, Open, Verdict
from amusd.protocol.target_session import TargetSession
from amusd.protocol.wire import decode, encode

VOCAB_SIZE = 50
PROMPT = (1, 2, 3, 4)
MAX_LENGTH = 400
NONCE = 7
EXTREMES = (0, 1, 2, 3, 7, VOCAB_SIZE, VOCAB_SIZE + 1, MAX_LENGTH, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 1)
OPENING = Open(1, 1, PROMPT, MAX_LENGTH, "d", 16, 2)
TREE_OPENING = replace(OPENING, fan_out=3, rows_per_step=4)


class Pair:
    """An honest draft and target of one sequence, and the results of a stranger's frames."""

    def __init__(self, rng: random.Random, *, tree: bool) -> None:
        self._rng = rng
        self._opening = TREE_OPENING if tree else OPENING
        self.target: TargetSession
        self.draft: DraftSession
        self.outcomes: Counter[str] = Counter()
        self.renew()

    def renew(self) -> None:
        self.target = target(self._opening.fan_out)
        self.draft = DraftSession(self._opening)

    def step(self) -> list[Message]:
        nodes = nodes_of(self.draft)
        guesses = [(self._rng.randrange(5), 0.6), (5 + self._rng.randrange(5), 0.3)]
        self.draft.tree.grow(nodes, [guesses[: self._opening.fan_out] for _ in nodes])
        offer = self.draft.offer()
        self.target.begin(self._rng.randrange(4))
        judged = self.target.to_judge()[0]
        num_accepted = self._rng.randint(0, min(len(judged), self.target.remaining - 1))
        self.target.commit((*judged[:num_accepted], self._rng.randrange(5)), num_accepted)
        verdict = self.target.verdict()
        return [verdict] if offer is None else [verdict, offer]

    def hear(self, message: Message) -> None:
        try:
            self._hear(message)
            self.outcomes["taken"] += 1
        except PeerProtocolError:
            self.outcomes["refused"] += 1

    def _hear(self, message: Message) -> None:
        if isinstance(message, Candidate):
            self.target.receive(message)
        elif isinstance(message, Verdict):
            self.draft.receive(message)
        elif isinstance(message, Open):
            DraftSession(message)

    def check(self) -> None:
        committed = self.target.committed
        assert committed[: len(PROMPT)] == PROMPT
        assert len(committed) <= MAX_LENGTH
        assert max(committed) < VOCAB_SIZE
        assert self.target.num_candidates <= MAX_LENGTH
        assert len(self.target._tree.nodes) <= MAX_NUMBERS
        encode(self.target.verdict(), NONCE)


def fuzz(num_messages: int, seed: int) -> Counter[str]:
    """Feed this many hostile messages and count their results. Raises errors that no message may cause."""
    rng = random.Random(seed)
    pairs = [Pair(rng, tree=False), Pair(rng, tree=True)]
    for number in range(num_messages):
        pair = pairs[number % 2]
        if pair.target.remaining < 1 or pair.draft.base >= MAX_LENGTH or number // 2 % 100 == 0:
            pair.renew()
        honest = pair.step()
        pair.hear(_spoilt(rng, rng.choice([*honest, *honest, OPENING, TREE_OPENING])))
        for message in honest:
            if rng.random() < 0.9:
                pair.hear(message)
        pair.check()
    return pairs[0].outcomes + pairs[1].outcomes


def _spoilt(rng: random.Random, message: Message) -> Message:
    """The message with one to three fields that no correct peer would give it, but which fit a frame."""
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(message.__struct_fields__)
        try:
            changed = replace(message, **{name: _other(rng, getattr(message, name))})
            encode(changed, NONCE)
        except ValueError:
            continue
        message = changed
    return message


def _other(rng: random.Random, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((rng.choice(EXTREMES), max(0, value + rng.randint(-3, 3))))
    if isinstance(value, tuple) and all(isinstance(item, int) for item in value):
        length = rng.choice((0, 1, 2, 5, 17, 300))
        return tuple(rng.choice((rng.randrange(VOCAB_SIZE), 2**31 - 1, VOCAB_SIZE)) for _ in range(length))
    if isinstance(value, tuple):
        return (rng.randbytes(8),) * rng.randint(0, 4)
    if isinstance(value, str):
        return "x" * rng.choice((0, 1, 100))
    return value


CHAIN = Candidate(1, 1, 4, hash_of(PROMPT), 1, (0, 1), (5, 6), (), more=True)
TREE = replace(CHAIN, weights=(CERTAINTY, 1))


def target(fan_out: int = 1) -> TargetSession:
    return attached(PROMPT, MAX_LENGTH, VOCAB_SIZE, fan_out=fan_out)


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
    "no candidates after a token": {"fan_out": 0},
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
