"""A delay is counted from the sending, whenever the receiver looks. The clock is the test's own."""

from __future__ import annotations

import pytest
from runtime.clocked import Clock

from amusd.protocol.messages import Shutdown
from amusd.protocol.wire import encode
from amusd.transport.base import Transport

DELAY_SECONDS = 0.2


class Link(Transport):
    delay_seconds = DELAY_SECONDS
    arrives_at = 0.0

    def send_frame(self, frame: bytes) -> None:
        raise NotImplementedError

    def receive_frame(self, timeout: float) -> bytes | None:
        now = self.clock.now()
        self.clock.sleep(min(timeout, max(0.0, self.arrives_at - now)))
        if self.arrives_at > now + timeout:
            return None
        return encode(Shutdown(), 0, 5_000_000_000)

    def close(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("arrives_in", [0.0, 0.003, 0.15, 0.3])
def test_a_message_comes_when_it_is_due_and_not_before(arrives_in: float) -> None:
    link = Link("memory://", 0)
    link.clock = clock = Clock()
    clock.sleep(5.0)
    link.arrives_at = 5.0 + arrives_in
    assert link.receive(0.0) is None
    assert link.receive(20.0) == Shutdown()
    assert clock.now() == pytest.approx(5 + max(DELAY_SECONDS, arrives_in))
