"""The contract of links (`transport/base.py`), checked for every link, also between two processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from runtime.clocked import Clock
from strategies import EXAMPLES
from transport.links import DEADLINE, LINKS, NONCE, PROCESS_LINKS, VERDICT, VIRTUAL_LINKS, Pair, expect, fill

from amusd.config import TransportConfig
from amusd.errors import PeerLostError
from amusd.protocol.messages import MAX_FEATURE_BYTES, Candidate, Failed, Features, Open, Shutdown, Verdict
from amusd.protocol.wire import encode
from amusd.transport import torch_distributed, zeromq
from amusd.transport.base import Transport
from amusd.transport.factory import connect, link_address, listen
from tests.warm import Popen

NUM_MESSAGES = 300
every_link = pytest.mark.parametrize("link", [*LINKS, *VIRTUAL_LINKS], indirect=True)


@pytest.fixture(params=LINKS)
def link(request: pytest.FixtureRequest) -> Iterator[Pair]:
    link = (LINKS | VIRTUAL_LINKS)[request.param]()
    yield link
    link.close()


@pytest.fixture
def ends(link: Pair) -> tuple[Transport, Transport]:
    ends = link.listen(), link.connect()  # the draft's end, which takes the nonce that comes first, and the target's
    for receiver, sender in (ends, ends[::-1]):
        sender.send(Shutdown())
        assert expect(receiver) == Shutdown()
    return ends


@pytest.fixture
def _patient_close(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (zeromq, torch_distributed):
        monkeypatch.setattr(module, "CLOSE_SECONDS", DEADLINE)


def verdict(number: int) -> Verdict:
    return Verdict(number, 1, 0, 0, (number,))


def candidate(number: int) -> Candidate:
    return Candidate(number, 1, 0, 0, 1, (0,), (number,), (), more=True)


def test_many_messages_each_way_at_once_arrive_in_order(ends: tuple[Transport, Transport]) -> None:
    verdicts = [verdict(number) for number in range(NUM_MESSAGES)]
    candidates = [candidate(number) for number in range(NUM_MESSAGES)]

    def work(end: Transport, to_send: list[Verdict] | list[Candidate]) -> list[object]:
        received: list[object] = []
        for message in to_send:
            end.send(message)
            if (answer := end.receive(0.0)) is not None:
                received.append(answer)
        while len(received) < NUM_MESSAGES:
            received.append(expect(end))
        return received

    with ThreadPoolExecutor(2) as threads:
        target, draft = threads.submit(work, ends[0], verdicts), threads.submit(work, ends[1], candidates)
        assert target.result(DEADLINE) == candidates
        assert draft.result(DEADLINE) == verdicts


@every_link
def test_every_kind_of_message_arrives_equal_in_both_directions(ends: tuple[Transport, Transport]) -> None:
    prompt = Open(1, 1, tuple(range(100_000)), 200_000, "embedded", 16, 1)
    for sender, receiver in (ends, ends[::-1]):
        for message in EXAMPLES:
            sender.send(message)
        sender.send(prompt)
        assert [expect(receiver) for _ in range(len(EXAMPLES) + 1)] == [*EXAMPLES, prompt]


def test_what_has_room_never_counts_as_too_much(ends: tuple[Transport, Transport]) -> None:
    sender, receiver = ends
    message = Features(1, 1, 0, 1, bytes(MAX_FEATURE_BYTES))
    for _ in range(2):
        number = 0
        while number < 20 and sender.has_room(2 * MAX_FEATURE_BYTES):
            sender.send(message)
            number += 1
        assert number >= 2
        sender.send(Shutdown())
        assert [expect(receiver) for _ in range(number + 1)] == [*[message] * number, Shutdown()]


@pytest.mark.parametrize("link", [*LINKS, "of the fault simulation", "clocked"], indirect=True)
def test_close_may_be_repeated_and_ends_every_use(ends: tuple[Transport, Transport]) -> None:
    for end in ends:
        end.close()
        end.close()
        with pytest.raises(PeerLostError):
            end.send(Shutdown())
        for timeout in (0.0, DEADLINE):
            with pytest.raises(PeerLostError):
                end.receive(timeout)


@pytest.mark.usefixtures("_patient_close")
@pytest.mark.parametrize("closing", [0, 1])
def test_everything_sent_before_a_close_is_handed_over_before_the_peer_counts_as_lost(
    ends: tuple[Transport, Transport], closing: int
) -> None:
    leaver, stayer = ends[closing], ends[1 - closing]
    for number in range(NUM_MESSAGES):
        leaver.send(candidate(number))
    leaver.close()
    assert [expect(stayer) for _ in range(NUM_MESSAGES)] == [candidate(number) for number in range(NUM_MESSAGES)]
    for _ in range(2):
        with pytest.raises(PeerLostError):
            stayer.receive(DEADLINE)
        with pytest.raises(PeerLostError):
            stayer.send(Shutdown())


@every_link
def test_what_the_connecting_end_sends_at_once_arrives_in_order(link: Pair) -> None:
    first = link.listen()
    assert first.receive(0.0) is None
    second = link.connect()
    for number in range(NUM_MESSAGES):
        second.send(candidate(number))
    assert [expect(first) for _ in range(NUM_MESSAGES)] == [candidate(number) for number in range(NUM_MESSAGES)]


def test_garbage_and_foreign_frames_are_counted_and_dropped_and_the_link_goes_on(
    ends: tuple[Transport, Transport], caplog: pytest.LogCaptureFixture
) -> None:
    receiver, sender = ends
    frame = encode(verdict(1), NONCE)
    foreign = encode(verdict(1), NONCE ^ 1)
    bad_frames = [b"", b"garbage", frame[:-1], frame + b"\0", frame[:4] + b"\xff" + frame[5:], foreign]
    with caplog.at_level("WARNING"):
        for bad_frame in bad_frames:
            sender.send_frame(bad_frame)
        assert receiver.receive(0.01) is None
        sender.send(candidate(1))
        assert expect(receiver) == candidate(1)
    assert receiver.num_rejected == len(bad_frames)
    assert sender.num_rejected == 0
    assert len(caplog.records) == 1
    receiver.send(verdict(2))
    assert expect(sender) == verdict(2)


def test_a_peer_that_does_not_read_is_lost_and_never_blocks_the_sender(ends: tuple[Transport, Transport]) -> None:
    message = Failed("E", "x" * 10_000)  # long, so that the system's own buffers fill soon
    started = time.monotonic()
    with pytest.raises(PeerLostError, match="stopped reading"):
        fill(ends[0], message)
    assert time.monotonic() - started < DEADLINE


# A delay, on a clock of the test's own


DELAY_SECONDS = 0.2


class Link(Transport):
    delay_seconds = DELAY_SECONDS
    arrives_at = 0.0
    sent_at = 5.0

    def send_frame(self, frame: bytes) -> None:
        raise NotImplementedError

    def receive_frame(self, timeout: float) -> bytes | None:
        now = self.clock.now()
        self.clock.sleep(min(timeout, max(0.0, self.arrives_at - now)))
        if self.arrives_at > now + timeout:
            return None
        return encode(Shutdown(), 0, round(self.sent_at * 1e9))

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


def test_a_message_from_a_machine_whose_clock_is_ahead_is_held_back_no_longer() -> None:
    link = Link("memory://", 0)
    link.clock, link.sent_at = Clock(), 1e6
    assert link.receive(20.0) == Shutdown()
    assert link.clock.now() == pytest.approx(DELAY_SECONDS)


def test_both_ends_have_the_delay_of_the_settings() -> None:
    config = TransportConfig(kind="zeromq", delay_ms=250)
    with link_address(config) as address, closing(listen(config, address)) as draft:
        target = connect(config, address, NONCE)
        assert target is not None
        target.close()
    assert (draft.delay_seconds, target.delay_seconds) == (0.25, 0.25)


# Two processes: a stopped one is slow, a killed one is lost, at either end


ROOT = Path(__file__).parents[2]
ECHO = f"""
import sys
sys.path.insert(0, "tests")
from amusd.protocol.messages import Verdict
from transport.links import PROCESS_LINKS
link = PROCESS_LINKS[sys.argv[1]]()
if sys.argv[2:]:
    end = link.connect(sys.argv[2])
    end.send({VERDICT!r})
else:
    end = link.listen()
    sys.stdout.write(end.address + "\\n")
    sys.stdout.flush()
while (message := end.receive({3 * DEADLINE})) is not None:
    end.send(message)
"""


@pytest.fixture(params=PROCESS_LINKS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(name: str) -> Iterator[Pair]:
    pair = PROCESS_LINKS[name]()
    yield pair
    pair.close()


def echo(*arguments: str) -> subprocess.Popen[Any]:
    return Popen([sys.executable, "-c", ECHO, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_stopped_process_is_slow_and_a_killed_one_is_lost(pair: Pair, name: str) -> None:
    end = pair.listen()
    with echo(name, end.address) as process, ThreadPoolExecutor(1) as threads:
        try:
            assert end.receive(3 * DEADLINE) == VERDICT
            os.kill(process.pid, signal.SIGSTOP)
            while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
                time.sleep(0.001)
            end.send(VERDICT)
            assert end.receive(0.2) is None
            os.kill(process.pid, signal.SIGCONT)
            assert expect(end) == VERDICT
            receiving = threads.submit(end.receive, DEADLINE)
            time.sleep(0.05)  # so that it sleeps; sooner is right as well
            process.kill()
            with pytest.raises(PeerLostError, match="the peer closed"):
                receiving.result(DEADLINE)
        finally:
            process.kill()


def test_the_death_of_the_listening_process_is_noticed_too(pair: Pair, name: str) -> None:
    with echo(name) as process:
        end = pair.connect(process.stdout.readline().strip())
        end.send(VERDICT)
        assert end.receive(3 * DEADLINE) == VERDICT
        process.kill()
        with pytest.raises(PeerLostError):
            end.receive(DEADLINE)
