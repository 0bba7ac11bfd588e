"""Measures one-way times of messages between two processes: half of a round trip, with encoding and decoding."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from typing import TypeAlias

from amusd.child import command_of
from amusd.config import TransportConfig
from amusd.errors import PeerLostError
from amusd.protocol.messages import Candidate, Features, Message, Verdict
from amusd.runtime.cores import allowed_cores, pin_to
from amusd.settings import from_mapping, to_mapping
from amusd.transport.base import Transport
from amusd.transport.factory import connect, listen

Cores: TypeAlias = tuple[set[int], set[int]]

ANSWER_SECONDS = 30.0
NUM_WARM_UP_EXCHANGES = 100

_NONCE = 1
CANDIDATE = Candidate(1, 1, 100, 2**63 + 1, 5, (4,), (5,), (), more=True)
LONG = Features(1, 1, 0, 8, bytes(65_536))
"""Too long for what a link of NCCL carries by gloo."""
_VERDICT = Verdict(1, 1, 3, 100, (5, 6, 7, 8), 3)


def measure_one_way(
    config: TransportConfig, *, num_messages: int, cores: Cores = (set(), set()), message: Message = CANDIDATE
) -> tuple[float, float]:
    """Send `message` to a child process `num_messages` times; it answers a candidate by a verdict, others by the same.

    Returns the median and the 99th percentile of the microseconds from `send` at one end to the end of `receive` at the
    other. `cores`: those of this process and the child; empty: any. Raises `ConfigError` when the link does not work
    here, and `PeerLostError` when the child ends or is silent for `ANSWER_SECONDS`.
    """
    allowed = set(allowed_cores())
    pin_to(cores[0])
    try:
        with closing(listen(config, _NONCE)) as link:
            orders = json.dumps([to_mapping(config), link.address, sorted(cores[1])])
            with subprocess.Popen([*command_of(__name__), orders]) as child:
                try:
                    _await(link)
                    times = [_exchange(link, message) for _ in range(NUM_WARM_UP_EXCHANGES + num_messages)]
                finally:
                    child.kill()
    finally:
        pin_to(allowed)
    measured = sorted(times[NUM_WARM_UP_EXCHANGES:])
    return measured[len(measured) // 2], measured[len(measured) * 99 // 100]


def _exchange(link: Transport, message: Message) -> float:
    started = time.perf_counter_ns()
    link.send(message)
    _await(link)
    return (time.perf_counter_ns() - started) / 2000


def _await(link: Transport) -> None:
    if link.receive(ANSWER_SECONDS) is None:
        raise PeerLostError(f"no message came within {ANSWER_SECONDS:g} seconds")


def main() -> None:
    """Run the child: answer each message."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the parent, which ends this process
    config, address, cores = json.loads(sys.argv[-1])
    pin_to(set(cores))
    with suppress(PeerLostError):
        link = connect(from_mapping(TransportConfig, config), address, _NONCE)
        link.send(_VERDICT)
        while (message := link.receive(ANSWER_SECONDS)) is not None:
            link.send(_VERDICT if isinstance(message, Candidate) else message)
