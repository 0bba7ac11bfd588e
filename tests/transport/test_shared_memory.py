"""Faults of shared-memory links alone: death in mid-write, strangers, bytes of any kind, one core for both."""

from __future__ import annotations

import mmap
import os
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport.links import NONCE, VERDICT, expect

from amusd.config import TransportConfig
from amusd.errors import ConfigError, PeerLostError
from amusd.protocol.messages import Verdict
from amusd.protocol.wire import MAX_FRAME_BYTES
from amusd.transport.factory import connect, link_address, listen
from amusd.transport.ring import CONTROL_BYTES, Rings
from amusd.transport.shared_memory import SharedMemoryTransport
from tests.warm import Popen

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory is for Linux")

ROOT = Path(__file__).parents[2]
FLOOD = f"""
import itertools, sys
from amusd.protocol.messages import Verdict
from amusd.transport.shared_memory import SharedMemoryTransport
link = SharedMemoryTransport.connect(sys.argv[1], {NONCE})
for number in itertools.count():
    link.send(Verdict(number, 1, 0, 0, (5,) * (number % 50)))
"""


LISTENS = """
import sys, time
from amusd.transport.shared_memory import SharedMemoryTransport
link = SharedMemoryTransport.bind(sys.argv[1])
print("listens", flush=True)
time.sleep(60)
"""


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"shm://{tmp_path}/link"


@pytest.fixture
def listener(address: str) -> Iterator[SharedMemoryTransport]:
    listener = SharedMemoryTransport.bind(address)
    yield listener
    listener.close()


def reach(address: str) -> SharedMemoryTransport:
    other = SharedMemoryTransport.connect(address, NONCE)
    assert other is not None
    return other


def test_a_writer_killed_in_a_flood_leaves_a_prefix_of_whole_messages(listener: SharedMemoryTransport) -> None:
    with Popen([sys.executable, "-c", FLOOD, listener.address], cwd=ROOT) as process:
        received = [listener.receive(60.0) for _ in range(1000)]
        process.kill()
    with pytest.raises(PeerLostError, match="the peer closed"):
        received.extend(iter(lambda: expect(listener), None))
    assert received == [Verdict(number, 1, 0, 0, (5,) * (number % 50)) for number in range(len(received))]
    assert listener.num_rejected == 0
    with pytest.raises(PeerLostError):
        listener.send(VERDICT)


def test_the_door_closes_behind_the_peer_and_a_stranger_without_memory_is_turned_away(
    address: str, listener: SharedMemoryTransport
) -> None:
    path = Path(address.removeprefix("shm://"))
    for said in (b"", b"GET / HTTP/1.1"):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(path))
            stranger.sendall(said)
            assert listener.receive(0.0) is None
    assert path.is_socket()
    other = reach(address)
    assert listener.receive(0.0) is None
    assert not path.exists()
    assert SharedMemoryTransport.connect(address, NONCE) is None, "nobody listens any more"
    other.close()


def test_the_next_listener_takes_the_place_of_one_that_was_killed(address: str) -> None:
    with Popen([sys.executable, "-c", LISTENS, address], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        process.kill()
    assert SharedMemoryTransport.connect(address, NONCE) is None
    listener, other = SharedMemoryTransport.bind(address), reach(address)
    other.send(VERDICT)
    assert expect(listener) == VERDICT
    other.close()
    listener.close()


def test_links_leave_no_files_and_no_descriptors(tmp_path: Path, address: str) -> None:
    def in_use() -> set[str]:
        descriptors = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return {str(path.resolve()) for path in (*tmp_path.iterdir(), *descriptors)}

    before = in_use()
    for has_peer in (True, False) * 5:
        listener = SharedMemoryTransport.bind(address)
        if has_peer:
            other = reach(address)
            other.send(VERDICT)
            assert expect(listener) == VERDICT
            other.close()
        listener.close()
    assert in_use() <= before


@pytest.mark.parametrize("missing", ["os.memfd_create", "socket.AF_UNIX"])
def test_where_it_cannot_work_auto_goes_on_and_the_explicit_choice_is_one_line(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delattr(missing)
    with link_address(TransportConfig()) as address:
        listen(TransportConfig(), address).close()
    with (
        pytest.raises(ConfigError, match=r"^transport=shared_memory: .*use transport=zeromq") as caught,
        link_address(TransportConfig(kind="shared_memory")),
    ):
        pass
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [listen, connect])
@pytest.mark.parametrize("kind", ["shared_memory", "zeromq"])
def test_a_link_that_cannot_be_made_for_lack_of_descriptors_is_one_line(kind: Any, make: Any) -> None:
    config = TransportConfig(kind=kind)
    with link_address(config) as address:
        listen(config, address).close()  # what is opened once is open now
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            with ExitStack() as opened:
                resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, limits[1]), limits[1]))
                with suppress(OSError):
                    while True:
                        opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
                with pytest.raises(ConfigError, match="Too many open files"):
                    make(config, address, NONCE)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not Path(address.partition("://")[2]).parent.exists()


# The bytes: a queue whatever the sizes, and safe from whatever the other end writes


SMALL = 256


class Pair:
    def __init__(self, num_ring_bytes: int = SMALL) -> None:
        self.sender, self.receiver = (mmap.mmap(-1, CONTROL_BYTES + size) for size in (num_ring_bytes, 4096))
        self.writer = Rings(self.sender, self.receiver)
        self.reader = Rings(self.receiver, self.sender)
        self.sent, self.received = (memoryview(area).cast("Q") for area in (self.sender, self.receiver))

    def claim(self, written: int) -> None:
        self.sent[0] = written

    def overwrite(self, offset: int, data: bytes) -> None:
        self.sender[CONTROL_BYTES + offset : CONTROL_BYTES + offset + len(data)] = data


def room_of(frame: bytes) -> int:
    return -(-(8 + len(frame)) // 8) * 8


steps = st.lists(st.one_of(st.none(), st.binary(max_size=SMALL - 8), st.binary(max_size=40)), max_size=60)


@given(steps)
def test_a_ring_is_a_queue_of_bounded_size_whatever_the_lengths(steps: list[bytes | None]) -> None:
    pair, model = Pair(), deque[bytes]()
    for frame in steps:
        if frame is None:
            assert pair.reader.take() == (model.popleft() if model else None)
        else:
            fits = sum(map(room_of, model)) + room_of(frame) <= SMALL
            assert pair.writer.put(frame) is fits
            if fits:
                model.append(frame)
        assert pair.reader.has_news() is bool(model)
    assert [pair.reader.take() for _ in range(len(model) + 1)] == [*model, None]


@given(steps, st.binary(min_size=SMALL, max_size=SMALL), st.integers(0, 2**64 - 1))
def test_whatever_is_written_gives_frames_or_one_error(steps: list[bytes | None], garbage: bytes, written: int) -> None:
    pair = Pair()
    for frame in steps:
        if frame is None:
            pair.reader.take()
        else:
            pair.writer.put(frame)
    pair.overwrite(0, garbage)
    for claimed in (pair.sent[0], pair.sent[0] + 8, written):
        pair.claim(claimed % 2**64)
        try:
            while (taken := pair.reader.take()) is not None:
                assert len(taken) <= SMALL
        except PeerLostError:
            pass


@pytest.mark.parametrize("num_claimed", [1, 4, 12, SMALL + 8, 2**63, 2**64 - 8])
def test_a_position_that_cannot_be_is_refused(num_claimed: int) -> None:
    pair = Pair()
    pair.claim(num_claimed)
    with pytest.raises(PeerLostError, match="bytes wait in the ring"):
        pair.reader.take()


@pytest.mark.parametrize("length", [9, SMALL, MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_length_beyond_what_was_written_is_refused_and_nothing_outside_is_read(length: int) -> None:
    pair = Pair()
    pair.overwrite(0, struct.pack("<II", length, zlib.crc32(b"", 0)))
    pair.claim(16)
    with pytest.raises(PeerLostError, match=f"record of {length} bytes"):
        pair.reader.take()


def test_a_damaged_record_is_empty_and_the_next_one_is_whole() -> None:
    pair = Pair()
    assert pair.writer.put(b"first")
    assert pair.writer.put(b"second")
    pair.overwrite(8, b"F")
    assert [pair.reader.take() for _ in range(3)] == [b"", b"second", None]


def test_a_record_of_an_earlier_lap_is_not_taken_for_a_new_one() -> None:
    pair = Pair()
    for _ in range(SMALL // 16):
        assert pair.writer.put(b"12345678")
        assert pair.reader.take() == b"12345678"
    pair.claim(SMALL + 16)  # the position is there, the new record not yet
    assert pair.reader.take() == b""


@pytest.mark.parametrize("claimed", [8, 2**64 - 1])
def test_a_reader_that_claims_more_than_was_written_is_refused(claimed: int) -> None:
    pair = Pair()
    pair.received[8] = claimed
    with pytest.raises(PeerLostError, match="claims to have read"):
        pair.writer.put(bytes(SMALL))
