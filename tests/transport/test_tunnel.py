"""A socket file on another machine: what goes in comes out, an end is an end at both ends, strangers get nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from amusd.errors import ConfigError
from amusd.transport import tunnel
from amusd.transport.curve import Keys, read_keys, write_keys
from amusd.transport.tunnel import Tunnel
from amusd.types import Role

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="127.0.0.2 is up on Linux"),
]
HOST = "127.0.0.2"
SECONDS = 20.0
ROOT = Path(__file__).parents[2]
ELSEWHERE = """
import socket, sys, time
from pathlib import Path
from amusd.transport.tunnel import Tunnel

Tunnel.connect(sys.argv[1], Path(sys.argv[2]), None)
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[2])
connection.sendall(b"here")
time.sleep(60)
"""


@pytest.fixture
def door(tmp_path: Path) -> Iterator[socket.socket]:
    """The socket file at which the first rank awaits the others."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "door"))
        listener.listen()
        listener.settimeout(SECONDS)
        yield listener


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    """Closes what a test opens."""
    with ExitStack() as stack:
        yield stack


def keys_of(folder: Path) -> tuple[Keys, Keys]:
    write_keys(folder)
    return read_keys(folder, Role.TARGET), read_keys(folder, Role.DRAFT)


def knock(ends: ExitStack, file: Path) -> socket.socket:
    connection = ends.enter_context(socket.socket(socket.AF_UNIX))
    connection.settimeout(SECONDS)
    connection.connect(str(file))
    return connection


def accepted(ends: ExitStack, door: socket.socket) -> socket.socket:
    connection = ends.enter_context(door.accept()[0])
    connection.settimeout(SECONDS)
    return connection


def received(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := connection.recv(size - len(data))):
        data += more
    return data


@pytest.mark.parametrize("has_keys", [True, False])
def test_each_connection_carries_bytes_both_ways_until_either_end_ends_it(
    tmp_path: Path, door: socket.socket, ends: ExitStack, has_keys: bool
) -> None:
    ours, theirs = keys_of(tmp_path / "keys") if has_keys else (None, None)
    long = os.urandom(500_000)
    with (
        closing(Tunnel.listen(HOST, tmp_path / "door", ours)) as here,
        closing(Tunnel.connect(here.address, tmp_path / "copy", theirs)) as there,
    ):
        pairs = []
        for _ in range(2):
            far = knock(ends, tmp_path / "copy")
            pairs.append((accepted(ends, door), far))
        for number, (near, far) in enumerate(pairs):
            far.sendall(b"rank %d" % number + long)
            near.sendall(b"command %d" % number)
        for number, (near, far) in enumerate(pairs):
            assert received(near, 6 + len(long)) == b"rank %d" % number + long
            assert received(far, 9) == b"command %d" % number
        (near, far), (other_near, other_far) = pairs
        near.close()
        assert far.recv(1) == b""
        other_far.sendall(b"last words")
        other_far.close()
        assert received(other_near, 10) == b"last words"
        assert other_near.recv(1) == b""
        assert not here.is_lost
        assert not there.is_lost
    assert not (tmp_path / "copy").exists()


def test_what_a_slow_process_has_not_read_comes_before_the_end(
    tmp_path: Path, door: socket.socket, ends: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel, "_LAST_SECONDS", SECONDS)
    long = os.urandom(2_000_000)  # more than a socket holds
    with (
        closing(Tunnel.listen(HOST, tmp_path / "door", None)) as here,
        closing(Tunnel.connect(here.address, tmp_path / "copy", None)),
    ):
        far = knock(ends, tmp_path / "copy")
        near = accepted(ends, door)
        near.sendall(b"go")
        assert received(far, 2) == b"go"
        far.sendall(long)
        far.close()
        while here._streams:  # until the end has come
            time.sleep(0.01)
        assert received(near, len(long)) == long
        assert near.recv(1) == b""


def test_where_the_first_rank_awaits_nobody_any_more_a_connection_ends_at_once(
    tmp_path: Path, door: socket.socket, ends: ExitStack
) -> None:
    with (
        closing(Tunnel.listen(HOST, tmp_path / "door", None)) as here,
        closing(Tunnel.connect(here.address, tmp_path / "copy", None)),
    ):
        door.close()
        assert knock(ends, tmp_path / "copy").recv(1) == b""


def test_a_killed_end_ends_the_connections_of_the_other(tmp_path: Path, door: socket.socket, ends: ExitStack) -> None:
    with closing(Tunnel.listen(HOST, tmp_path / "door", None)) as here:
        program = [sys.executable, "-c", ELSEWHERE, here.address, str(tmp_path / "copy")]
        with subprocess.Popen(program, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
            try:
                near = accepted(ends, door)
                assert received(near, 4) == b"here"
            finally:
                process.kill()
        assert near.recv(1) == b""
        assert here.is_lost


def test_a_connection_to_an_end_that_is_closed_already_ends(
    tmp_path: Path, door: socket.socket, ends: ExitStack
) -> None:
    here = Tunnel.listen(HOST, tmp_path / "door", None)
    with closing(Tunnel.connect(here.address, tmp_path / "copy", None)) as there:
        here.close()
        assert knock(ends, tmp_path / "copy").recv(1) == b""
        assert there.is_lost
    door.close()


@pytest.mark.parametrize("case", ["other keys", "no key", "a key too many"])
def test_who_has_another_key_or_none_is_refused_in_a_line(
    tmp_path: Path, door: socket.socket, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(tunnel, "CONNECT_SECONDS", 1.0)
    ours, _ = keys_of(tmp_path / "keys")
    _, theirs = keys_of(tmp_path / "other")
    listens, asks = {"other keys": (ours, theirs), "no key": (ours, None), "a key too many": (None, theirs)}[case]
    with closing(Tunnel.listen(HOST, tmp_path / "door", listens)) as here:
        start = time.monotonic()
        with pytest.raises(ConfigError, match=r"no answer of rank 0 within 1 seconds: .*transport\.keys do not fit"):
            Tunnel.connect(here.address, tmp_path / "copy", asks)
        assert time.monotonic() - start < SECONDS
    door.settimeout(0.0)
    with pytest.raises(BlockingIOError):
        door.accept()


def test_a_port_that_nobody_serves_is_refused_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "CONNECT_SECONDS", 0.5)
    with socket.create_server((HOST, 0)) as free:
        address = f"tcp://{HOST}:{free.getsockname()[1]}"
    with pytest.raises(ConfigError, match="the port is not reachable"):
        Tunnel.connect(address, tmp_path / "copy", None)


def test_an_address_that_is_not_of_this_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"transport\.interface: cannot listen at 192\.0\.2\.1"):
        Tunnel.listen("192.0.2.1", tmp_path / "door", None)
