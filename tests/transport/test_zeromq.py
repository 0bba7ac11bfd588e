"""What only a link between processes can suffer: death, strangers, oversized frames, public addresses."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from transport.links import DEADLINE, NONCE, expect, fill

from amusd.config import TransportConfig
from amusd.errors import ConfigError, PeerLostError
from amusd.protocol.messages import Shutdown, Verdict
from amusd.protocol.wire import MAX_FRAME_BYTES, encode
from amusd.transport import zeromq
from amusd.transport.factory import listen
from amusd.transport.zeromq import ZeroMQTransport

LOOPBACK = "tcp://127.0.0.1:*"
VERDICT = Verdict(1, 1, 0, 0, (5,), 0)


@pytest.fixture(params=[None, LOOPBACK], ids=["socket file", "tcp"])
def listener(request: pytest.FixtureRequest) -> Iterator[ZeroMQTransport]:
    listener = ZeroMQTransport.bind(request.param, NONCE)
    yield listener
    listener.close()


@pytest.fixture
def other(listener: ZeroMQTransport) -> Iterator[ZeroMQTransport]:
    """The other end; each has heard the other."""
    other = ZeroMQTransport.connect(listener.address, NONCE)
    for sender, receiver in ((other, listener), (listener, other)):
        sender.send(VERDICT)
        assert expect(receiver) == VERDICT
    yield other
    other.close()


@pytest.fixture
def stranger() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.linger = 0
        yield socket


def test_what_comes_between_the_last_look_and_the_end_is_handed_over(
    listener: ZeroMQTransport, other: ZeroMQTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_link_between_machines_has_heartbeats_and_a_local_one_has_none(listener: ZeroMQTransport) -> None:
    assert listener._socket.get(zmq.HEARTBEAT_IVL) == 0  # libzmq would drop a peer that is stopped
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
    listener: ZeroMQTransport, other: ZeroMQTransport, stranger: zmq.Socket[bytes]
) -> None:
    monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    stranger.connect(listener.address)
    assert monitor.poll(DEADLINE * 1000)
    stranger.send(encode(Shutdown(), NONCE))
    stranger.disable_monitor()
    monitor.close()
    stranger.close()
    assert listener.receive(0.3) is None
    other.send(VERDICT)
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


def test_close_waits_for_nobody_who_never_came_or_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for ever if it were not bounded."""
    monkeypatch.setattr(zeromq, "CLOSE_SECONDS", 0.05)
    ends = [ZeroMQTransport.bind(LOOPBACK, NONCE), ZeroMQTransport.connect("ipc:///nonexistent/link", NONCE)]
    for end in ends:
        end.send(VERDICT)
        end.close()
    listener = ZeroMQTransport.bind(LOOPBACK, NONCE)
    peer = ZeroMQTransport.connect(listener.address, NONCE)
    peer.send(VERDICT)
    assert expect(listener) == VERDICT
    with pytest.raises(PeerLostError, match="stopped reading"):
        fill(listener, VERDICT)
    listener.close()
    peer.close()


def test_a_private_socket_file_lies_in_a_folder_of_this_user_that_close_removes() -> None:
    listener = ZeroMQTransport.bind(None, NONCE)
    path = Path(listener.address.removeprefix("ipc://"))
    assert path.is_socket()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    listener.close()
    assert not path.parent.exists()


@pytest.mark.parametrize("place", ["127.0.0.2:0", "localhost:*", "[::1]:*"])
def test_loopback_addresses_are_allowed_and_tell_their_real_port(place: str) -> None:
    try:
        listener = ZeroMQTransport.bind(f"tcp://{place}", NONCE)
    except ConfigError:
        if "[::1]" in place:
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


REMOTE = ["tcp://*:5555", "tcp://0.0.0.0:5555", "tcp://[::]:5555", "tcp://192.168.1.5:5555"]
REMOTE += ["tcp://eth0:5555", "tcp://localhost.example.org:5555", "tcp://127.0.0.1;10.0.0.1:5555", "tcp://127.1:5555"]
MALFORMED = ["", "127.0.0.1:5555", "ipc://", "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://:5555"]
MALFORMED += ["tcp://127.0.0.1:99999", "tcp://127.0.0.1:http", "shm:///tmp/link", "tcp://127.0.0.1:-1"]


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
def test_a_malformed_address_is_refused_in_one_line(address: str) -> None:
    for open_end in (ZeroMQTransport.bind, ZeroMQTransport.connect):
        with pytest.raises(ConfigError, match="expected ipc://PATH or tcp://HOST:PORT"):
            open_end(address, NONCE, insecure=True)


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


def test_the_factory_falls_back_to_loopback_where_there_are_no_socket_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")  # nor shared memory
    monkeypatch.setattr(zmq, "has", lambda _: False)
    listener = listen(TransportConfig(), NONCE)
    assert listener.address.startswith("tcp://127.0.0.1:")
    listener.close()
