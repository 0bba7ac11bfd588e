"""The bounded queue between a worker and the threads of its link."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from amusd.errors import PeerLostError
from amusd.transport.base import MAX_QUEUED_MESSAGES
from amusd.transport.frame_queue import MAX_QUEUED_BYTES, FrameQueue

DEADLINE = 20.0


def filled(*frames: bytes) -> FrameQueue:
    queue = FrameQueue()
    for frame in frames:
        assert queue.put(frame, 0.0)
    return queue


@pytest.mark.parametrize("frames", [[b""] * MAX_QUEUED_MESSAGES, [bytes(MAX_QUEUED_BYTES // 2)] * 2])
def test_it_is_full_at_its_limits_and_has_room_again_after_one_is_taken(frames: list[bytes]) -> None:
    queue = filled(*frames)
    assert not queue.put(b"x", 0.0)
    assert queue.take(0.0) == frames[:1]
    assert queue.put(b"x", 0.0)


def test_a_put_waits_for_room() -> None:
    queue = filled(bytes(MAX_QUEUED_BYTES))
    with ThreadPoolExecutor(1) as threads:
        putting = threads.submit(queue.put, b"x")
        assert queue.take(0.0) == [bytes(MAX_QUEUED_BYTES)]
        assert putting.result(DEADLINE)
    assert queue.take(0.0) == [b"x"]


@pytest.mark.parametrize("discard", [False, True])
def test_the_end_wakes_who_waits(discard: bool) -> None:
    full, empty = filled(bytes(MAX_QUEUED_BYTES)), FrameQueue()
    with ThreadPoolExecutor(2) as threads:
        putting, taking = threads.submit(full.put, b"x"), threads.submit(empty.take, DEADLINE)
        full.end("over", discard=discard)
        empty.end("over", discard=discard)
        assert not putting.result(DEADLINE)
        with pytest.raises(PeerLostError, match="over"):
            taking.result(DEADLINE)


def test_what_was_in_at_the_end_can_be_taken_unless_it_is_discarded() -> None:
    queue = filled(b"a", b"b")
    queue.end("first")
    assert not queue.put(b"c", 0.0)
    assert queue.take(0.0) == [b"a"]
    queue.end("second", discard=True)
    with pytest.raises(PeerLostError, match="first"):
        queue.take(DEADLINE)
