"""Faults of process-group links alone: death, a wrong length, threads that stay, no GPU."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import Mock

import psutil
import pytest
import torch
from strategies import EXAMPLES
from test_listeners import LOOPBACK, listeners
from transport.links import DEADLINE, NONCE, VERDICT, expect

from amusd.config import TransportConfig
from amusd.errors import PeerLostError
from amusd.protocol.messages import Open
from amusd.runner.process_group import ProcessGroup
from amusd.transport import torch_distributed
from amusd.transport.base import Transport
from amusd.transport.factory import address_in, connect, listen
from amusd.transport.torch_distributed import FORM_SECONDS, NCCL_SETTINGS, Bodies, TorchDistributedTransport

LONG = Open(1, 1, tuple(range(5000)), 9000, "embedded", 16, 1)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[TorchDistributedTransport]:
    listener = TorchDistributedTransport(f"gloo://{tmp_path}", None, "cpu", 0)
    yield listener
    listener.close()


@pytest.fixture
def ends(listener: TorchDistributedTransport) -> Iterator[tuple[TorchDistributedTransport, TorchDistributedTransport]]:
    other = TorchDistributedTransport(listener.address, NONCE, "cpu", 1)
    other.send(VERDICT)
    assert expect(listener) == VERDICT
    yield listener, other
    other.close()


def lasting_threads() -> list[str]:
    """Threads of links, this test's or an earlier one's, that do not end.

    One closed while its groups form ends late, and so does one whose peer closed amid a send: when that runs out.
    """
    deadline = time.monotonic() + FORM_SECONDS + DEADLINE + 5
    while names := [thread.name for thread in threading.enumerate() if thread.name.startswith(("gloo-", "nccl-"))]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return names


def test_links_leave_no_threads_and_no_descriptors_behind(tmp_path: Path) -> None:
    def live_and_die() -> None:
        (folder := tmp_path / str(time.monotonic())).mkdir()
        listener = TorchDistributedTransport(f"gloo://{folder}", None, "cpu", 0)
        other = TorchDistributedTransport(listener.address, NONCE, "cpu", 1)
        other.send(VERDICT)
        assert expect(listener) == VERDICT
        other.close()
        listener.close()

    live_and_die()  # what torch opens once
    before = psutil.Process().num_fds()
    for _ in range(3):
        live_and_die()
    assert not lasting_threads()
    assert psutil.Process().num_fds() <= before + 2


def test_a_peer_that_announces_too_long_a_frame_is_lost(
    ends: tuple[TorchDistributedTransport, TorchDistributedTransport], caplog: pytest.LogCaptureFixture
) -> None:
    listener, other = ends
    other.send(VERDICT)
    assert expect(listener) == VERDICT
    other._send_block(2**31)
    with pytest.raises(PeerLostError, match=f"announced {2**31} bytes"):
        listener.receive(DEADLINE)
    with pytest.raises(PeerLostError, match="announced"):
        listener.send(VERDICT)
    with pytest.raises(PeerLostError, match="the peer closed"):
        other.receive(DEADLINE)
    assert "announced" in caplog.text


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells what a process listens to")
def test_a_link_listens_on_loopback_alone(ends: tuple[TorchDistributedTransport, TorchDistributedTransport]) -> None:
    addresses = {one[0] for one in listeners([psutil.Process()]) if not isinstance(one, str)}
    assert addresses
    assert {address for address in addresses if not address.endswith("7F")} <= LOOPBACK, "127.0.0.0/8 or ::1"


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Pretend that NCCL and two GPUs are here; bodies take a gloo group. Returns the rank and device of each."""
    made = []

    def host_bodies(store: Any, rank: int, device: str) -> Bodies:
        made.append((rank, device))
        return Bodies(torch_distributed.gloo_group(store, rank, 2, DEADLINE), timedelta(seconds=DEADLINE))

    monkeypatch.setattr(torch_distributed.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch_distributed, "device_bodies", host_bodies)
    return made


def pair_of_nccl(folder: Path) -> tuple[Transport, Transport]:
    config = TransportConfig(kind="nccl")
    address = address_in(str(folder), config)
    target = connect(config, address, NONCE)
    assert target is not None
    return listen(config, address), target


@pytest.mark.parametrize("kind", [RuntimeError, TypeError])
def test_a_link_that_does_not_form_says_why_at_both_ends(
    two_gpus: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch, kind: type[Exception], tmp_path: Path
) -> None:
    assert two_gpus == []
    monkeypatch.setattr(torch_distributed, "device_bodies", Mock(side_effect=kind("/dev/shm is too small\nmore")))
    listener, target = pair_of_nccl(tmp_path)
    reason = r"^the link did not form: .*/dev/shm is too small; NCCL_DEBUG=INFO says more, or use transport=auto$"
    try:
        for end in (listener, target):
            with pytest.raises(PeerLostError, match=reason):
                end.receive(DEADLINE)
            with pytest.raises(PeerLostError, match=reason):
                end.send(VERDICT)
    finally:
        target.close()
        listener.close()
    assert not lasting_threads()


def test_groups_of_nccl_have_settings_by_which_a_lost_peer_ends_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def make(*_: object) -> None:
        seen.append({name: os.environ.get(name) for name in NCCL_SETTINGS})

    group = Mock(side_effect=make)
    monkeypatch.setattr(torch_distributed.distributed, "ProcessGroupNCCL", group, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", Mock())
    with mock.patch.dict(os.environ, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}):
        torch_distributed.device_bodies(None, 0, "cuda:0")
    with mock.patch.dict(os.environ):
        ProcessGroup(0, 2, "tcp://1.2.3.4:5", "nccl", store=Mock())._make("cuda:0")
    assert seen == [NCCL_SETTINGS] * 2


def test_nccl_carries_every_message_with_groups_of_its_own_for_each_direction(
    two_gpus: list[tuple[int, str]], tmp_path: Path
) -> None:
    listener, target = pair_of_nccl(tmp_path)
    try:
        for sender, receiver in ((target, listener), (listener, target)):
            for message in (LONG, *EXAMPLES, LONG):
                sender.send(message)
            assert [expect(receiver) for _ in range(len(EXAMPLES) + 2)] == [LONG, *EXAMPLES, LONG]
        assert sorted(two_gpus) == [(0, "cuda:1"), (0, "cuda:1"), (1, "cuda:0"), (1, "cuda:0")]
    finally:
        target.close()
        listener.close()
    assert not lasting_threads()
