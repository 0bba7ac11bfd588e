"""A delay is counted from the sending, whenever the receiver looks. The clock is the test's own."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest

from amusd.protocol.messages import Message, Shutdown
from amusd.protocol.wire import encode
from amusd.transport import delayed
from amusd.transport.base import FrameCodec
from amusd.transport.delayed import DelayedTransport

DELAY_SECONDS = 0.2
MS = 1_000_000


class Link:
    address = "memory://"
    has_room = None

    def __init__(self) -> None:
        self.frames = FrameCodec(0)
        self.now_ns = 5_000 * MS
        self.arrivals: deque[tuple[int, bytes]] = deque()

    def send(self, message: Message, arrives_in_ms: int = 0) -> None:
        self.arrivals.append((self.now_ns + arrives_in_ms * MS, encode(message, 0, self.now_ns)))

    def receive(self, timeout: float) -> Message | None:
        deadline_ns = self.now_ns + round(timeout * 1e9)
        if not self.arrivals or self.arrivals[0][0] > deadline_ns:
            self.now_ns = deadline_ns
            return None
        self.now_ns = max(self.now_ns, self.arrivals[0][0])
        return self.frames.accept(self.arrivals.popleft()[1])

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)

    def close(self) -> None:
        self.arrivals.clear()


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    link = Link()
    monkeypatch.setattr(delayed, "time", SimpleNamespace(monotonic_ns=lambda: link.now_ns, sleep=link.sleep))
    return link


@pytest.fixture
def receiver(link: Link) -> DelayedTransport:
    return DelayedTransport(link, DELAY_SECONDS)


@pytest.mark.parametrize("arrives_in_ms", [0, 3, 150, 300])
def test_a_message_comes_when_it_is_due_and_not_before(
    link: Link, receiver: DelayedTransport, arrives_in_ms: int
) -> None:
    before_ns = link.now_ns
    link.send(Shutdown(), arrives_in_ms)
    assert receiver.receive(0.0) is None
    assert receiver.receive(20.0) == Shutdown()
    assert link.now_ns - before_ns == max(DELAY_SECONDS * 1e9, arrives_in_ms * MS)
