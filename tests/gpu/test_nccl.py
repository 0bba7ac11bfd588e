"""Long messages from GPU to GPU (`make test-nccl`). NCCL refuses two processes on one device, so it takes two."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from amusd.commands.other_worker import measure_one_way
from amusd.config import TransportConfig
from amusd.errors import PeerLostError
from amusd.protocol.messages import Open, Shutdown, Verdict
from amusd.transport.base import Transport
from amusd.transport.factory import connect, link_address

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.nccl,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]

NONCE = 0xFEEDFACE12345678
NCCL = TransportConfig(kind="nccl")
SHORT = Verdict(1, 1, 0, 0, (5,))
LONG = Open(1, 1, tuple(range(200_000)), 300_000, "embedded", 16, 1)
ECHO = """
import sys
from amusd.config import TransportConfig
from amusd.protocol.messages import Shutdown
from amusd.transport.factory import listen
link = listen(TransportConfig(kind="nccl"), sys.argv[1])
while (message := link.receive(120.0)) is not None and message != Shutdown():
    link.send(message)
link.close()
"""


@pytest.fixture
def echo() -> Iterator[subprocess.Popen[bytes]]:
    with link_address(NCCL) as address:
        process = subprocess.Popen([sys.executable, "-c", ECHO, address], cwd=Path(__file__).parents[2])
        process.address = address  # type: ignore[attr-defined]
        yield process
        process.kill()
        process.wait(20.0)


@pytest.fixture
def target(echo: subprocess.Popen[bytes]) -> Iterator[Transport]:
    link = connect(NCCL, echo.address, NONCE)  # type: ignore[attr-defined]
    assert link is not None
    link.send(SHORT)
    assert link.receive(120.0) == SHORT
    yield link
    link.close()


def test_long_and_short_messages_arrive_in_order_in_both_directions(
    target: Transport, echo: subprocess.Popen[bytes]
) -> None:
    messages = [SHORT, LONG, SHORT, SHORT, LONG, LONG] * 20
    for message in messages:
        target.send(message)
    assert [target.receive(60.0) for _ in messages] == messages


def test_the_target_survives_a_draft_that_dies_with_a_long_message_under_way(
    target: Transport, echo: subprocess.Popen[bytes]
) -> None:
    for _ in range(20):
        target.send(LONG)
    echo.kill()

    def receive_for_ever() -> None:
        while target.receive(60.0) is not None:
            pass

    with pytest.raises(PeerLostError):
        receive_for_ever()
    with pytest.raises(PeerLostError):
        target.send(Shutdown())
    assert torch.ones(3, device="cuda:0").sum().item() == 3  # no kernel is left that spins there


def test_the_link_works_between_processes_that_are_measured() -> None:
    assert measure_one_way(NCCL, num_messages=200)[0] > 0
