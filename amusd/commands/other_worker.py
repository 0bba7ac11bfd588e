"""A child process in place of the other worker, which answers messages or computes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from typing import Any, TypeAlias

from amusd.child import command_of
from amusd.config import TransportConfig
from amusd.errors import PeerLostError
from amusd.protocol.messages import Candidate, Features, Message, Verdict
from amusd.runtime.cores import pin_to
from amusd.settings import from_mapping, to_mapping
from amusd.transport.factory import connect, link_address, listen

ANSWER_SECONDS = 30.0
READY_SECONDS = 60.0
NUM_WARM_UP_EXCHANGES = 100
CANDIDATE = Candidate(1, 1, 100, 2**63 + 1, 5, (4,), (5,), (), more=True)
LONG = Features(1, 1, 0, 8, bytes(65_536))
"""A message so long that an NCCL link carries it by NCCL, not by gloo."""
_VERDICT = Verdict(1, 1, 3, 100, (5, 6, 7, 8))
_NONCE = 1
_SIZE = 4096
"""Rows and columns of a float32 matrix that is too large for a cache."""
_WORK, _REST = b"w", b"r"

Surrounding: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Returns a context in which work is timed."""


def measure_one_way(
    config: TransportConfig, *, num_messages: int, cores: AbstractSet[int] = frozenset(), message: Message = CANDIDATE
) -> tuple[float, float]:
    """The median and the 99th percentile of half a round trip in microseconds, encoding and decoding included.

    The other process answers a candidate by a verdict, and sends any other message back. `cores`: of the other
    process; empty: any. Raises `ConfigError` when the link does not work here, and `PeerLostError` when the process
    ends or is silent for `ANSWER_SECONDS`.
    """

    def wait() -> None:
        if link.receive(ANSWER_SECONDS) is None:
            raise PeerLostError(f"no message came within {ANSWER_SECONDS:g} seconds")

    times = []
    with (
        link_address(config) as place,
        closing(listen(config, place, _NONCE)) as link,
        _started("answer", cores, to_mapping(config), link.address),
    ):
        wait()
        for _ in range(NUM_WARM_UP_EXCHANGES + num_messages):
            begin = time.perf_counter_ns()
            link.send(message)
            wait()
            times.append((time.perf_counter_ns() - begin) / 2000)
    measured = sorted(times[NUM_WARM_UP_EXCHANGES:])
    return measured[len(measured) // 2], measured[len(measured) * 99 // 100]


@contextmanager
def neighbour(device: str, cores: AbstractSet[int]) -> Iterator[Surrounding]:
    """Start a process that idles on the other worker's device; yield `busy`, a context in which it computes.

    `cores`: of the process; empty: any. `busy` raises `PeerLostError` if the process ends, or `READY_SECONDS` pass.
    """
    pipe = subprocess.PIPE
    with _started("compute", cores, device, stdin=pipe, stdout=pipe, bufsize=0) as process:
        orders, answers = process.stdin, process.stdout

        def tell(order: bytes) -> None:
            with suppress(BrokenPipeError):  # the process has ended: no answer comes either
                orders.write(order)

        @contextmanager
        def busy() -> Iterator[None]:
            tell(_WORK)
            if not select.select([answers], [], [], READY_SECONDS)[0] or not answers.read(1):
                raise PeerLostError("the process beside which passes are timed does not compute")
            yield
            tell(_REST)

        yield busy


@contextmanager
def _started(work: str, cores: AbstractSet[int], *settings: Any, **options: Any) -> Iterator[Any]:
    command = [*command_of(__name__), json.dumps([work, sorted(cores), *settings])]
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def main() -> None:
    """Run the other process; it ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the parent, which ends this process
    work, cores, *settings = json.loads(sys.argv[-1])
    pin_to(set(cores))
    if work == "compute":
        _compute(max(1, len(cores)), *settings)
    else:
        _answer(*settings)


def _answer(config: dict[str, Any], address: str) -> None:
    with suppress(PeerLostError):
        link = connect(from_mapping(TransportConfig, config), address, _NONCE)
        assert link is not None, "the parent listens"
        link.send(_VERDICT)
        while (message := link.receive(ANSWER_SECONDS)) is not None:
            link.send(_VERDICT if isinstance(message, Candidate) else message)


def _compute(num_threads: int, device: str) -> None:
    import torch

    torch.set_num_threads(num_threads)
    rows, weight = (torch.rand(number, _SIZE, device=device) for number in (4, _SIZE))
    orders, answers = sys.stdin.fileno(), sys.stdout.fileno()
    while order := os.read(orders, 1):
        if order == _WORK:
            os.write(answers, _WORK)
        while order == _WORK and not select.select([orders], [], [], 0.0)[0]:
            (rows @ weight).sum().item()
