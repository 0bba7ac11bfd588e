"""What only a link between processes can suffer: death, strangers, oversized frames, public addresses."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from transport.links import DEADLINE, NONCE, expect, fill

from amusd.config import TransportConfig
from amusd.errors import ConfigError, PeerLostError
from amusd.protocol.messages import Shutdown, Verdict
from amusd.protocol.wire import MAX_FRAME_BYTES, encode
from amusd.transport import zeromq
from amusd.transport.base import Rendezvous
from amusd.transport.factory import connect, listen
from amusd.transport.zeromq import CLOSE_SECONDS, ZeroMQTransport

LOOPBACK = "tcp://127.0.0.1:*"
VERDICT = Verdict(1, 1, 0, 0, (5,), 0)
ECHO = """
import sys
from amusd.protocol.messages import Shutdown
from amusd.transport.zeromq import ZeroMQTransport
link = ZeroMQTransport.connect(sys.argv[1], int(sys.argv[2]))
while (message := link.receive(60.0)) is not None and message != Shutdown():
    link.send(message)
link.close()
"""


@pytest.fixture(params=[None, LOOPBACK], ids=["socket file", "tcp"])
def listener(request: pytest.FixtureRequest) -> Iterator[ZeroMQTransport]:
    listener = ZeroMQTransport.bind(request.param, NONCE)
    yield listener
    listener.close()


@pytest.fixture
def echo(listener: ZeroMQTransport) -> Iterator[subprocess.Popen[bytes]]:
    """A peer in a process of its own that sends everything back."""
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen([sys.executable, "-c", ECHO, listener.address, str(NONCE)], cwd=root)
    listener.send(VERDICT)
    assert listener.receive(60.0) == VERDICT
    yield process
    process.kill()
    process.wait(DEADLINE)


@pytest.fixture
def stranger() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.linger = 0
        yield socket


def test_a_killed_process_is_a_lost_peer(listener: ZeroMQTransport, echo: subprocess.Popen[bytes]) -> None:
    echo.kill()
    with pytest.raises(PeerLostError):
        listener.receive(10.0)
    with pytest.raises(PeerLostError):
        listener.send(Shutdown())


def test_polls_and_sends_notice_a_killed_process_too(listener: ZeroMQTransport, echo: subprocess.Popen[bytes]) -> None:
    assert listener.receive(0.0) is None  # it has looked, and has to look again
    echo.kill()

    def poll_for_ever() -> None:
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            listener.receive(0.0)

    with pytest.raises(PeerLostError, match="the peer closed"):
        poll_for_ever()
    with pytest.raises(PeerLostError, match="the peer closed"):
        fill(listener, VERDICT)


def test_what_comes_between_the_last_look_and_the_end_is_handed_over(
    listener: ZeroMQTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ZeroMQTransport.connect(listener.address, NONCE)
    other.send(VERDICT)
    assert expect(listener) == VERDICT
    watch = listener._watch_peer

    def watch_late() -> None:
        other.send(VERDICT)
        other.close()
        assert listener._monitor.poll(DEADLINE * 1000)
        monkeypatch.undo()
        watch()

    watch()
    listener._next_look = 0.0
    monkeypatch.setattr(listener, "_watch_peer", watch_late)
    assert listener.receive(DEADLINE) == VERDICT
    with pytest.raises(PeerLostError):
        listener.receive(DEADLINE)


def test_the_death_of_the_listening_process_is_noticed_too() -> None:
    child = "\n".join(
        [
            "import sys",
            "from amusd.transport.zeromq import ZeroMQTransport",
            f"link = ZeroMQTransport.bind({LOOPBACK!r}, {NONCE})",
            "sys.stdout.write(link.address + '\\n'); sys.stdout.flush()",
            "link.send(link.receive(60.0)); link.receive(60.0)",
        ]
    )
    root = str(Path(__file__).parents[2])
    with subprocess.Popen([sys.executable, "-c", child], cwd=root, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        link = ZeroMQTransport.connect(process.stdout.readline().strip(), NONCE)
        try:
            link.send(VERDICT)
            assert link.receive(60.0) == VERDICT
            process.kill()
            with pytest.raises(PeerLostError):
                link.receive(10.0)
        finally:
            process.kill()
            link.close()


def test_a_stopped_process_is_slow_not_lost(listener: ZeroMQTransport, echo: subprocess.Popen[bytes]) -> None:
    os.kill(echo.pid, signal.SIGSTOP)
    listener.send(VERDICT)
    assert listener.receive(0.3) is None
    os.kill(echo.pid, signal.SIGCONT)
    assert expect(listener) == VERDICT
    assert listener._socket.get(zmq.HEARTBEAT_IVL) == 0  # or libzmq would drop it, however long it is stopped


def test_a_link_between_machines_has_heartbeats() -> None:
    link = ZeroMQTransport.connect("tcp://192.0.2.1:5555", NONCE, insecure=True)
    try:
        assert link._socket.get(zmq.HEARTBEAT_IVL) == 1000
        assert link._socket.get(zmq.HEARTBEAT_TIMEOUT) == 5000
    finally:
        link.close()


def test_garbage_from_a_raw_socket_is_dropped_and_the_link_goes_on(
    listener: ZeroMQTransport, stranger: zmq.Socket[bytes]
) -> None:
    stranger.connect(listener.address)
    for frame in (b"garbage", encode(VERDICT, NONCE ^ 1), encode(VERDICT, NONCE)):
        stranger.send(frame)
    stranger.send_multipart([b"a", b"b"])
    stranger.send(encode(Shutdown(), NONCE))
    assert [expect(listener), expect(listener)] == [VERDICT, Shutdown()]
    assert listener.frames.num_rejected == 4


def test_a_stranger_beside_the_peer_is_not_read_and_its_leaving_ends_nothing(
    listener: ZeroMQTransport, echo: subprocess.Popen[bytes], stranger: zmq.Socket[bytes]
) -> None:
    monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    stranger.connect(listener.address)
    assert monitor.poll(DEADLINE * 1000)
    stranger.send(encode(Shutdown(), NONCE))
    stranger.disable_monitor()
    monitor.close()
    stranger.close()
    assert listener.receive(0.3) is None
    listener.send(VERDICT)
    assert expect(listener) == VERDICT
    assert listener.frames.num_rejected == 0


def test_a_frame_over_the_limit_ends_the_connection_and_not_the_worker(
    listener: ZeroMQTransport, stranger: zmq.Socket[bytes]
) -> None:
    stranger.connect(listener.address)
    stranger.send(encode(VERDICT, NONCE))
    assert expect(listener) == VERDICT
    stranger.send(bytes(MAX_FRAME_BYTES + 1))
    with pytest.raises(PeerLostError):
        listener.receive(DEADLINE)


class AddedWaits:
    """In the place of an end's sockets and clock: adds up how long `close` lets them wait."""

    def __init__(self, end: ZeroMQTransport, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        end._monitor = Waiting(end._monitor, self)  # type: ignore[assignment]  # has what is used of it
        end._socket = Waiting(end._socket, self)  # type: ignore[assignment]
        monkeypatch.setattr(zeromq, "time", SimpleNamespace(monotonic=lambda: self.seconds))


class Waiting:
    def __init__(self, socket: zmq.Socket[bytes], waits: AddedWaits) -> None:
        self.socket = socket
        self.waits = waits

    def poll(self, milliseconds: int) -> int:
        self.waits.seconds += milliseconds / 1000
        return self.socket.poll(0)

    def close(self, linger: int) -> None:
        self.waits.seconds += linger / 1000
        self.socket.close(linger)

    def __getattr__(self, name: str) -> object:
        return getattr(self.socket, name)


@pytest.mark.parametrize("num_messages", [0, 10])
def test_close_is_quick_when_nobody_ever_came(num_messages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [ZeroMQTransport.bind(LOOPBACK, NONCE), ZeroMQTransport.connect("ipc:///nonexistent/link", NONCE)]
    for end in ends:
        for _ in range(num_messages):
            end.send(VERDICT)
    for end in ends:
        waits = AddedWaits(end, monkeypatch)
        end.close()
        assert waits.seconds <= CLOSE_SECONDS


def test_close_is_quick_when_the_peer_does_not_read(listener: ZeroMQTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = ZeroMQTransport.connect(listener.address, NONCE)
    peer.send(VERDICT)
    assert expect(listener) == VERDICT
    with pytest.raises(PeerLostError, match="stopped reading"):
        fill(listener, VERDICT)
    waits = AddedWaits(listener, monkeypatch)
    listener.close()
    assert 0 < waits.seconds <= CLOSE_SECONDS
    peer.close()


def test_a_private_socket_file_lies_in_a_folder_of_this_user_that_close_removes() -> None:
    listener = ZeroMQTransport.bind(None, NONCE)
    path = Path(listener.address.removeprefix("ipc://"))
    assert path.is_socket()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    listener.close()
    assert not path.parent.exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "[::1]"])
@pytest.mark.parametrize("port", ["*", "0"])
def test_loopback_addresses_are_allowed_and_tell_their_real_port(host: str, port: str) -> None:
    try:
        listener = ZeroMQTransport.bind(f"tcp://{host}:{port}", NONCE)
    except ConfigError:
        if host == "[::1]":
            pytest.skip("this machine has no IPv6")
        raise
    peer = ZeroMQTransport.connect(listener.address, NONCE)
    try:
        assert int(listener.address.rpartition(":")[2]) > 0
        peer.send(VERDICT)
        assert expect(listener) == VERDICT
    finally:
        peer.close()
        listener.close()


REMOTE = ["tcp://*:5555", "tcp://0.0.0.0:5555", "tcp://[::]:5555", "tcp://192.168.1.5:5555", "tcp://example.org:5555"]
REMOTE += ["tcp://eth0:5555", "tcp://localhost.example.org:5555", "tcp://127.0.0.1;10.0.0.1:5555", "tcp://127.1:5555"]
MALFORMED = ["", "5555", "127.0.0.1:5555", "ipc://", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://:5555"]
MALFORMED += [
    "tcp://127.0.0.1:99999",
    "tcp://127.0.0.1:http",
    "udp://127.0.0.1:5555",
    "inproc://link",
    "tcp://127.0.0.1:-1",
]


@pytest.mark.parametrize("address", REMOTE)
def test_an_address_beyond_this_machine_needs_insecure_at_both_ends(address: str) -> None:
    for open_end in (ZeroMQTransport.bind, ZeroMQTransport.connect):
        with pytest.raises(ConfigError, match=r"transport\.insecure=true") as caught:
            open_end(address, NONCE)
        assert "\n" not in str(caught.value)


def test_insecure_allows_all_interfaces() -> None:
    listener = listen(TransportConfig(address="tcp://0.0.0.0:*", insecure=True), NONCE)
    assert listener.address.startswith("tcp://0.0.0.0:")
    listener.close()


@pytest.mark.parametrize("address", MALFORMED)
@pytest.mark.parametrize("insecure", [False, True])
def test_a_malformed_address_is_refused_in_one_line(address: str, insecure: bool) -> None:
    for open_end in (ZeroMQTransport.bind, ZeroMQTransport.connect):
        with pytest.raises(ConfigError, match="expected ipc://PATH or tcp://HOST:PORT"):
            open_end(address, NONCE, insecure=insecure)


def test_an_address_that_is_taken_and_a_port_to_be_picked_are_refused() -> None:
    listener = ZeroMQTransport.bind(LOOPBACK, NONCE)
    try:
        with pytest.raises(ConfigError, match="cannot listen there: Address already in use"):
            ZeroMQTransport.bind(listener.address, NONCE)
        with pytest.raises(ConfigError, match="PORT from 1 to 65535"):
            ZeroMQTransport.connect(LOOPBACK, NONCE)
        with pytest.raises(ConfigError, match="cannot listen there"):
            ZeroMQTransport.bind("ipc:///" + "long" * 50, NONCE)
    finally:
        listener.close()


def test_the_factory_listens_on_a_private_socket_file_unless_told_otherwise() -> None:
    config = TransportConfig(kind="zeromq")
    listener = listen(config, NONCE)
    draft = connect(config, Rendezvous(listener.address, NONCE))
    try:
        assert listener.address.startswith("ipc://")
        draft.send(VERDICT)
        assert expect(listener) == VERDICT
    finally:
        draft.close()
        listener.close()


def test_the_factory_falls_back_to_loopback_where_there_are_no_socket_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")  # nor shared memory
    monkeypatch.setattr(zmq, "has", lambda _: False)
    listener = listen(TransportConfig(), NONCE)
    assert listener.address.startswith("tcp://127.0.0.1:")
    listener.close()
