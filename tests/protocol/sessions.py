"""Builders that the tests of the two sessions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amusd.protocol.draft_session import DraftSession
from amusd.protocol.draft_tree import Node, Transition, next_nodes
from amusd.protocol.messages import Candidate, Verdict
from amusd.protocol.prefix_hash import EMPTY, extend
from amusd.protocol.target_session import TargetSession


class Unhashed(TargetSession):
    """Without the prefix hash, the last line of defence, so that the rules have to hold by themselves."""

    def _prefix_fits(self, candidate: Candidate) -> bool:
        return True


def attached(prompt: tuple[int, ...], max_length: int = 20, vocab_size: int = 100, **options: Any) -> TargetSession:
    session = TargetSession(sequence_id=1, prompt=prompt, max_length=max_length, vocab_size=vocab_size, **options)
    session.attach(1)
    return session


def hash_of(token_ids: Sequence[int]) -> int:
    value = EMPTY
    for token_id in token_ids:
        value = extend(value, token_id)
    return value


def nodes_of(session: DraftSession) -> tuple[Node, ...]:
    return next_nodes([session.tree])[0]


def judge(session: TargetSession, *tokens: int, accepted: int) -> None:
    session.begin(6)
    session.commit(tokens, accepted)


def hear(session: DraftSession, verdict: Verdict) -> Transition:
    transition = session.receive(verdict)
    assert transition is not None
    return transition


def offered(session: DraftSession) -> Candidate:
    message = session.offer()
    assert message is not None
    return message
