"""Two workers on virtual time: who acts first, what is seen when, and what a link promises."""

from __future__ import annotations

import math
from collections import deque
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amusd.protocol.messages import Message, Shutdown
from amusd.simulation.clock import Clock, Direction
from amusd.simulation.cost import Duration


class Draft:
    """Receives, works for so long on what came, and answers it `num_answers` times."""

    def __init__(self, *, delay: int = 0, patience: float = 1.0, work: int = 0, num_answers: int = 0) -> None:
        delays = Duration((delay,))
        self.clock = Clock(Direction(delays, Random(1)), Direction(delays, Random(1)), deque([self.step]))
        self.patience, self.work, self.num_answers = patience, work, num_answers
        self.received: list[tuple[int, bool]] = []
        """When each wait ended, and whether with a message."""
        self.target_worked: list[bool] = []

    def step(self) -> None:
        message = self.clock.receive_at_draft(self.patience)
        self.received.append((self.clock.draft_ns, message is not None))
        if message is not None:
            self.target_worked.append(self.clock.target_works)
            self.clock.draft_ns += self.work
            for _ in range(self.num_answers):
                self.clock.to_target.send(self.clock.draft_ns, Shutdown())

    def tell(self) -> None:
        self.clock.to_draft.send(self.clock.target_ns, Shutdown())


def test_the_draft_sees_a_message_when_it_arrives_and_not_before() -> None:
    draft = Draft(delay=5)
    draft.clock.let_pass(10)
    draft.tell()
    draft.clock.let_pass(4)
    assert draft.received == []
    draft.clock.let_pass(1)
    assert draft.received == [(15, True)]


@pytest.mark.parametrize(("timeout", "time_ns", "comes"), [(10, 7, True), (7, 7, True), (6, 6, False), (0, 0, False)])
def test_the_target_waits_for_an_answer_as_long_as_it_may(timeout: int, time_ns: int, comes: bool) -> None:
    draft = Draft(delay=2, work=3, num_answers=1)
    draft.tell()
    message = draft.clock.receive_at_target(timeout / 1e9)
    assert (draft.clock.target_ns, message is not None) == (time_ns, comes)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.lists(st.integers(0, 100), min_size=1, max_size=5))
def test_a_link_keeps_the_order_and_the_least_delay(pauses: list[int], delays: list[int]) -> None:
    link, now_ns, sent = Direction(Duration(tuple(delays)), Random(1)), 0, []
    messages: list[Message] = [Shutdown() for _ in pauses]
    for pause, message in zip(pauses, messages, strict=True):
        now_ns += pause
        sent.append(now_ns)
        link.send(now_ns, message)
    arrived = []
    while link.next_ns < math.inf:
        arrived.append(int(link.next_ns))
        assert link.take(arrived[-1] - 1) is None
        assert link.take(arrived[-1]) is messages[len(arrived) - 1]
    assert arrived == sorted(arrived)
    for sent_ns, time_ns in zip(sent, arrived, strict=True):
        assert sent_ns + min(delays) <= time_ns <= sent_ns + max(delays)
