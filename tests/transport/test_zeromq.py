"""What only a link between processes can suffer: death, strangers, oversized frames, public addresses."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import zmq
from lines import refusal
from transport.links import DEADLINE, NONCE, VERDICT, expect, fill

from amusd.errors import PeerLostError
from amusd.protocol.messages import Failed
from amusd.protocol.wire import MAX_FRAME_BYTES, encode
from amusd.transport import zeromq
from amusd.transport.zeromq import ZeroMQTransport

LOOPBACK = "tcp://127.0.0.1:*"


@pytest.fixture(params=["ipc://{}/link", LOOPBACK], ids=["socket file", "tcp"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ZeroMQTransport]:
    listener = ZeroMQTransport(request.param.format(tmp_path), NONCE, listens=True)
    yield listener
    listener.close()


@pytest.fixture
def other(listener: ZeroMQTransport) -> Iterator[ZeroMQTransport]:
    other = ZeroMQTransport(listener.address, NONCE, listens=False)
    for sender, receiver in ((other, listener), (listener, other)):
        sender.send(VERDICT)
        assert expect(receiver) == VERDICT
    yield other
    other.close()


@pytest.fixture
def stranger() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        yield socket


def test_a_link_of_no_more_use_is_left_at_once(
    listener: ZeroMQTransport, other: ZeroMQTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    lingers: list[int] = []
    close = zmq.Socket.close
    monkeypatch.setattr(zmq.Socket, "close", lambda own, linger=None: (lingers.append(linger), close(own, 0)))
    listener.drop()
    assert lingers == [0, 0]
    with pytest.raises(PeerLostError):
        expect(other)


def test_a_tunnel_that_closes_while_no_draft_is_behind_it_says_nothing_of_keys() -> None:
    with socket.create_server(("127.0.0.1", 0)) as tunnel:
        address = f"tcp://127.0.0.1:{tunnel.getsockname()[1]}"
        with closing(ZeroMQTransport(address, NONCE, listens=False)) as target:
            for _ in range(3):
                connection, _ = tunnel.accept()
                connection.close()
                assert target.receive(0.1) is None
            assert target.refusal is None


def test_a_second_peer_is_told_so_and_disturbs_nothing(listener: ZeroMQTransport, other: ZeroMQTransport) -> None:
    listener.answer_to_others = Failed("PeerError", "taken")
    with closing(ZeroMQTransport(listener.address, NONCE ^ 1, listens=False)) as second:
        second.send(VERDICT)
        other.send(VERDICT)
        assert expect(listener) == VERDICT
        while listener.num_rejected == 0:
            assert listener.receive(0.01) is None
        assert expect(second) == Failed("PeerError", "taken")
    for sender, receiver in ((other, listener), (listener, other)):
        sender.send(VERDICT)
        assert expect(receiver) == VERDICT
    other.close()
    with pytest.raises(PeerLostError):
        listener.receive(DEADLINE)


def test_who_comes_first_and_says_nothing_takes_nobody_s_place(listener: ZeroMQTransport) -> None:
    silent, talking = (ZeroMQTransport(listener.address, NONCE, listens=False) for _ in range(2))
    with closing(silent):
        while not silent._is_attached:
            assert silent.receive(0.01) is None
        talking.send(VERDICT)
        assert expect(listener) == VERDICT
        talking.close()
        with pytest.raises(PeerLostError):
            listener.receive(DEADLINE)


def test_a_frame_over_the_limit_ends_the_link_alone(listener: ZeroMQTransport, stranger: zmq.Socket[bytes]) -> None:
    stranger.connect(listener.address)
    stranger.send(encode(VERDICT, NONCE))
    assert expect(listener) == VERDICT
    stranger.send(bytes(MAX_FRAME_BYTES + 1))
    with pytest.raises(PeerLostError):
        listener.receive(DEADLINE)


def test_close_waits_for_nobody_who_never_came_or_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeromq, "CLOSE_SECONDS", 0.05)
    alone = ZeroMQTransport("ipc:///nonexistent/link", NONCE, listens=False)
    alone.send(VERDICT)
    alone.close()
    listener = ZeroMQTransport(LOOPBACK, NONCE, listens=True)
    peer = ZeroMQTransport(listener.address, NONCE, listens=False)
    peer.send(VERDICT)
    assert expect(listener) == VERDICT
    with pytest.raises(PeerLostError, match="stopped reading"):
        fill(listener, VERDICT)
    listener.close()
    peer.close()


REMOTE = ["tcp://*:5555", "tcp://0.0.0.0:5555", "tcp://[::]:5555", "tcp://192.168.1.5:5555"]
REMOTE += ["tcp://eth0:5555", "tcp://localhost.example.org:5555", "tcp://127.0.0.1;10.0.0.1:5555", "tcp://127.1:5555"]
MALFORMED = ["", "127.0.0.1:5555", "ipc://", "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://:5555"]
MALFORMED += ["tcp://127.0.0.1:99999", "tcp://127.0.0.1:http", "shm:///tmp/link", "tcp://127.0.0.1:-1"]


@pytest.mark.parametrize("address", [*REMOTE, *MALFORMED])
def test_an_address_beyond_this_machine_needs_insecure_and_a_malformed_one_is_refused(address: str) -> None:
    is_remote = address in REMOTE
    reason = "transport.insecure=true" if is_remote else "expected ipc://PATH or tcp://HOST:PORT"
    for listens in (True, False):
        make = partial(ZeroMQTransport, address, NONCE, listens=listens, insecure=not is_remote)
        assert reason in refusal(make)
