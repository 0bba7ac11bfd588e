"""Hostile messages by the thousand: those of an honest peer with spoilt fields, for a chain and a tree.

Deterministic in its seed. A message is handed to the session of its kind, which may refuse it with `PeerProtocolError`
and nothing else. Between them an honest peer goes on with its work. Frames with spoilt bytes are in `test_wire.py`.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from msgspec import structs
from protocol.sessions import nodes_of

from amusd.errors import PeerProtocolError
from amusd.protocol.candidate_tree import MAX_NUMBERS
from amusd.protocol.draft_session import DraftSession
from amusd.protocol.messages import Candidate, Message, Open, Verdict
from amusd.protocol.target_session import TargetSession
from amusd.protocol.wire import encode

VOCAB_SIZE = 50
PROMPT = (1, 2, 3, 4)
MAX_LENGTH = 400
NONCE = 7
EXTREMES = (0, 1, 2, 3, 7, VOCAB_SIZE, VOCAB_SIZE + 1, MAX_LENGTH, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 1)
OPENING = Open(1, 1, PROMPT, MAX_LENGTH, "d", 16, 2)
TREE_OPENING = structs.replace(OPENING, fan_out=3, rows_per_step=4)


class Pair:
    """An honest draft and target of one sequence, and what a stranger's frames did to them."""

    def __init__(self, rng: random.Random, *, tree: bool) -> None:
        self._rng = rng
        self._opening = TREE_OPENING if tree else OPENING
        self.target: TargetSession
        self.draft: DraftSession
        self.outcomes: Counter[str] = Counter()
        self.renew()

    def renew(self) -> None:
        self.target = TargetSession(
            sequence_id=1, prompt=PROMPT, max_length=MAX_LENGTH, vocab_size=VOCAB_SIZE, fan_out=self._opening.fan_out
        )
        self.target.attach(1)
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
    """Feed so many hostile messages; what became of them. Raises what no message may cause."""
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
            changed = structs.replace(message, **{name: _other(rng, getattr(message, name))})
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
