"""Peers that break the protocol: what they send is dropped and counted, and the loop goes on."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from memory_link import memory_pair
from msgspec.structs import replace
from runtime.clocked import Clock, Link

from amusd.drafters.ngram import NgramDrafter
from amusd.protocol.messages import Candidate, Close, Message, Open, Progress, Shutdown, Verdict
from amusd.runtime.connection import Connection
from amusd.runtime.draft_client import DraftClient
from amusd.runtime.draft_worker import DraftWorker
from amusd.tracing.recorder import Recorder
from amusd.transport.base import Transport

OPENING = Open(1, 1, (1, 2, 1, 2), 20, "ngram", 4, 1, not_over=(1, 2))
HOSTILE = {
    "an opening without room": replace(OPENING, sequence_id=2, max_length=3),
    "an opening of a life that is over": replace(OPENING, sequence_id=2, incarnation=7),
    "the same opening again": OPENING,
    "a verdict behind a gap": Verdict(1, 1, 0, 9, (1,)),
    "an opening that says of itself that it is over": replace(OPENING, sequence_id=2, not_over=(1, 3)),
    "a verdict for nobody": Verdict(9, 1, 0, 4, (1,)),
    "a message of its own side": Candidate(1, 1, 4, 0, 1, (0,), (1,), (), more=True),
}


class OneByOne:
    """A link that never has two messages at once: a verdict before a `Close` is not passed over."""

    def __init__(self, link: Transport) -> None:
        self._link = link
        self.send, self.close = link.send, link.close

    def receive(self, timeout: float) -> Message | None:
        return self._link.receive(timeout) if timeout else None


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_target_is_not_obeyed_and_the_next_message_is(name: str) -> None:
    target, draft = memory_pair()
    worker = DraftWorker(OneByOne(draft), {"ngram": [NgramDrafter(2)]}, 1, Recorder("draft"))
    for message in (OPENING, HOSTILE[name], Close(1), Shutdown()):
        target.send(message)
    worker.run()
    answers = answers_at(target)
    assert isinstance(answers[-1], Progress)
    assert (answers[-1].sequence_id, answers[-1].num_rollbacks) == (1, 0)
    assert {answer.base for answer in answers if isinstance(answer, Candidate)} == {4}


def answers_at(target: Transport) -> list[Message]:
    answers = []
    while (answer := target.receive(0.0)) is not None:
        answers.append(answer)
    return answers


def test_a_flood_of_large_messages_keeps_the_target_from_its_pass_for_a_moment_only() -> None:
    clock = Clock()
    num_read = 0

    class Flood(Link):
        def receive(self, timeout: float) -> Message:
            nonlocal num_read
            num_read += 1
            clock.pass_by(0.005)
            return Progress(1, 0, 0, 0, 1)

    client = DraftClient(Recorder("target", clock=clock), Connection(Flood(clock), 1))
    sequence: Any = Mock(at_draft=None, max_silence_seconds=1.0)
    client._sequences[1] = sequence
    client.drain()
    assert num_read == 4
    client.drain()
    assert num_read == 8
