"""A delay is counted from the sending, whenever the receiver looks. The clock is the test's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from amusd.protocol.messages import Shutdown
from amusd.protocol.wire import encode
from amusd.transport import base
from amusd.transport.base import Transport

DELAY_SECONDS = 0.2


class Link(Transport):
    now = 5.0
    arrives_at = 0.0

    def send_frame(self, frame: bytes) -> None:
        raise NotImplementedError

    def receive_frame(self, timeout: float) -> bytes | None:
        if self.arrives_at > self.now + timeout:
            self.now += timeout
            return None
        self.now = max(self.now, self.arrives_at)
        return encode(Shutdown(), 0, 5_000_000_000)

    def close(self) -> None:
        raise NotImplementedError

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("arrives_in", [0.0, 0.003, 0.15, 0.3])
def test_a_message_comes_when_it_is_due_and_not_before(monkeypatch: pytest.MonkeyPatch, arrives_in: float) -> None:
    link = Link("memory://", 0)
    link.delay_seconds, link.arrives_at = DELAY_SECONDS, link.now + arrives_in
    monkeypatch.setattr(base, "time", SimpleNamespace(monotonic=lambda: link.now, sleep=link.sleep))
    assert link.receive(0.0) is None
    assert link.receive(20.0) == Shutdown()
    assert link.now == pytest.approx(5 + max(DELAY_SECONDS, arrives_in))
