"""What only a shared-memory link can suffer: death in mid-write, strangers at the door, sleep, one core for both."""

from __future__ import annotations

import os
import resource
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from transport.links import NONCE, expect

from amusd.config import TransportConfig
from amusd.errors import ConfigError, PeerLostError
from amusd.protocol.messages import Verdict
from amusd.transport.factory import listen
from amusd.transport.shared_memory import SharedMemoryTransport
from tests.warm import Popen

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory is for Linux")

ROOT = Path(__file__).parents[2]
VERDICT = Verdict(1, 1, 0, 0, (5,), 0)
FLOOD = f"""
import itertools, sys
from amusd.protocol.messages import Verdict
from amusd.transport.shared_memory import SharedMemoryTransport
link = SharedMemoryTransport.connect(sys.argv[1], {NONCE})
for number in itertools.count():
    link.send(Verdict(number, 1, 0, 0, (5,) * (number % 50), 0))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def listener(folder: Path) -> Iterator[SharedMemoryTransport]:
    listener = SharedMemoryTransport.bind(NONCE)
    yield listener
    listener.close()


def test_a_writer_killed_in_a_flood_leaves_a_prefix_of_whole_messages(listener: SharedMemoryTransport) -> None:
    with Popen([sys.executable, "-c", FLOOD, listener.address], cwd=ROOT) as process:
        received = [listener.receive(60.0) for _ in range(1000)]
        process.kill()
    with pytest.raises(PeerLostError, match="the peer closed"):
        received.extend(iter(lambda: expect(listener), None))
    assert received == [Verdict(number, 1, 0, 0, (5,) * (number % 50), 0) for number in range(len(received))]
    assert listener.num_rejected == 0
    with pytest.raises(PeerLostError):
        listener.send(VERDICT)


def test_the_door_is_private_and_gone_once_the_peer_has_come(folder: Path, listener: SharedMemoryTransport) -> None:
    path = Path(listener.address.removeprefix("shm://"))
    assert path.is_socket()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    other = SharedMemoryTransport.connect(listener.address, NONCE)
    assert listener.receive(0.0) is None
    assert list(folder.iterdir()) == []
    other.close()


def test_links_leave_no_files_and_no_descriptors(folder: Path) -> None:
    def in_use() -> tuple[int, list[Path]]:
        return psutil.Process().num_fds(), sorted([*folder.iterdir(), *Path("/dev/shm").glob("amusd*")])

    before = in_use()
    for has_peer in (True, False) * 5:
        listener = SharedMemoryTransport.bind(NONCE)
        if has_peer:
            other = SharedMemoryTransport.connect(listener.address, NONCE)
            other.send(VERDICT)
            assert expect(listener) == VERDICT
            other.close()
        listener.close()
    assert in_use() == before


@pytest.mark.parametrize("missing", ["os.memfd_create", "socket.AF_UNIX"])
def test_where_it_cannot_work_auto_goes_on_and_the_explicit_choice_is_one_line(
    missing: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(missing)
    listen(TransportConfig(), NONCE).close()
    with pytest.raises(ConfigError, match=r"^transport=shared_memory: .*use transport=zeromq") as caught:
        listen(TransportConfig(kind="shared_memory"), NONCE)
    assert "\n" not in str(caught.value)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("kind", ["shared_memory", "zeromq"])
def test_a_link_that_cannot_be_made_for_lack_of_descriptors_leaves_no_folder(folder: Path, kind: Any) -> None:
    listen(TransportConfig(kind=kind), NONCE).close()  # what is opened once is open now
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with ExitStack() as opened:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, limits[1]), limits[1]))
            with suppress(OSError):
                while True:
                    opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            with pytest.raises(ConfigError, match="Too many open files"):
                listen(TransportConfig(kind=kind), NONCE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [*folder.iterdir()] == []
