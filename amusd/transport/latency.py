"""Measures the time of a message from one process to the other, over the real link, as the workers use it.

Both processes are on one machine, where `time.monotonic_ns` is one clock: every time is from just before `send` at one
end to just after `receive` at the other, encoding and decoding included, and no round trip is halved. One message is in
flight; the receiver waits in `receive`, as long as the other end pauses.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from amusd.child import command_of
from amusd.config import TransportConfig
from amusd.errors import PeerLostError
from amusd.protocol.messages import Candidate, Message, Shutdown, Verdict
from amusd.settings import from_mapping, to_mapping
from amusd.transport.base import Rendezvous, Transport
from amusd.transport.factory import connect, listen

ANSWER_SECONDS = 30.0
"""Longest wait for the other process."""
NUM_WARM_UP_EXCHANGES = 100
"""Before those that are measured."""
NUM_POLLS = 2000
"""Polls of an empty link that are measured."""

_NONCE = 1
_CANDIDATE = Candidate(1, 1, 100, 100, 2**63 + 1, 5, (4,), (5,), (), more=True)
_VERDICT = Verdict(1, 1, 3, 100, (5, 6, 7, 8), 3)


@dataclass(frozen=True, slots=True)
class OneWayTime:
    """The time of messages over one link, in microseconds."""

    p50_us: float
    """Microseconds from `send` to the end of `receive`, median over both directions."""
    p99_us: float
    """The same, 99th percentile."""
    num_messages: int
    """Messages that were measured."""
    poll_us: float
    """Microseconds of a `receive(0)` that finds nothing, mean."""
    address: str
    """Address of the link; its scheme tells what `transport=auto` chose."""


@dataclass(slots=True)
class _Times:
    """The times at which one end sent and received, in nanoseconds of the one clock, one entry a message."""

    sent: list[int]
    received: list[int]

    def send(self, link: Transport, message: Message, pause_seconds: float) -> None:
        """Keep the core for a while, as a model does, then send."""
        until = time.monotonic() + pause_seconds
        while time.monotonic() < until:
            pass
        self.sent.append(time.monotonic_ns())
        link.send(message)

    def receive(self, link: Transport) -> None:
        """Wait for a message. Raises PeerLostError."""
        _expect(link)
        self.received.append(time.monotonic_ns())


def measure_one_way(
    config: TransportConfig,
    *,
    num_messages: int,
    cores: tuple[set[int], set[int]] = (set(), set()),
    pause_seconds: float = 0.0,
) -> OneWayTime:
    """Exchange at least `num_messages` candidates and verdicts, one at a time, with a child process.

    Args:
        config: The link, as a run would have it.
        num_messages: Measured messages, both directions together.
        cores: Where this process and the child run meanwhile; an empty set leaves it to the system.
        pause_seconds: How long each end works before it sends, while the other waits in `receive`.

    Raises:
        ConfigError: The link does not work here.
        PeerLostError: The child ended, or did not answer within `ANSWER_SECONDS`.
    """
    num_exchanges = NUM_WARM_UP_EXCHANGES + -(-num_messages // 2)
    with _pinned(cores[0]):
        link = listen(config, _NONCE)
        child = subprocess.Popen(command_of(__name__), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            orders = {
                "config": to_mapping(config),
                "rendezvous": asdict(Rendezvous(link.address, _NONCE)),
                "cores": sorted(cores[1]),
                "num_exchanges": num_exchanges,
                "pause_seconds": pause_seconds,
            }
            assert child.stdin is not None
            child.stdin.write(json.dumps(orders) + "\n")
            child.stdin.flush()
            own = _Times([], [])
            for _ in range(num_exchanges):
                own.send(link, _CANDIDATE, pause_seconds)
                own.receive(link)
            poll_us = _time_polls(link)
            link.send(Shutdown())
            output, _ = child.communicate(timeout=ANSWER_SECONDS)
            return _summary(own, _Times(**json.loads(output)), poll_us, link.address)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            raise PeerLostError(f"the process at the other end of the link failed: {error}") from error
        finally:
            child.kill()
            child.communicate()
            link.close()


def _expect(link: Transport) -> None:
    """Wait for a message. Raises PeerLostError when none comes within `ANSWER_SECONDS`."""
    if link.receive(ANSWER_SECONDS) is None:
        raise PeerLostError(f"no message came within {ANSWER_SECONDS:g} seconds")


def _time_polls(link: Transport) -> float:
    started = time.monotonic_ns()
    for _ in range(NUM_POLLS):
        link.receive(0.0)
    return (time.monotonic_ns() - started) / NUM_POLLS / 1000


def _summary(own: _Times, childs: _Times, poll_us: float, address: str) -> OneWayTime:
    there = zip(own.sent, childs.received, strict=True)
    back = zip(childs.sent, own.received, strict=True)
    taken = sorted(
        (end - start) / 1000 for pairs in (there, back) for start, end in list(pairs)[NUM_WARM_UP_EXCHANGES:]
    )
    return OneWayTime(
        p50_us=taken[len(taken) // 2],
        p99_us=taken[len(taken) * 99 // 100],
        num_messages=len(taken),
        poll_us=poll_us,
        address=address,
    )


@contextmanager
def _pinned(cores: set[int]) -> Iterator[None]:
    """Run this thread, and what it starts, on these cores; the child pins itself."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def main() -> None:
    """Run the child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the parent, which ends this process
    orders = json.loads(sys.stdin.readline())
    with _pinned(set(orders["cores"])):
        link = connect(from_mapping(TransportConfig, orders["config"]), Rendezvous(**orders["rendezvous"]))
        try:
            times = _Times([], [])
            for _ in range(orders["num_exchanges"]):
                times.receive(link)
                times.send(link, _VERDICT, orders["pause_seconds"])
            _expect(link)  # it waits while the parent polls
            sys.stdout.write(json.dumps(asdict(times)))
        finally:
            link.close()
