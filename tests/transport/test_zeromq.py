"""Faults of ZeroMQ links alone: death, strangers, oversized frames, public addresses and wrong keys."""

from __future__ import annotations

import dataclasses
import logging
import re
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq
from lines import refusal
from transport.links import DEADLINE, NONCE, VERDICT, expect, fill

from amusd.config import EngineConfig, TransportConfig
from amusd.errors import ConfigError, PeerLostError
from amusd.protocol.messages import Failed
from amusd.protocol.wire import MAX_FRAME_BYTES, encode
from amusd.transport import zeromq
from amusd.transport.curve import read_keys, write_keys
from amusd.transport.factory import check_link, connect, listen, numbered_link
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


def test_a_peer_that_comes_first_and_says_nothing_takes_nobodys_place(listener: ZeroMQTransport) -> None:
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
MALFORMED += [
    "tcp://127.0.0.1:99999",
    "tcp://127.0.0.1:http",
    "shm:///tmp/link",
    "tcp://127.0.0.1:-1",
    f"tcp://127.0.0.1:{'9' * 5_000}",
]


@pytest.mark.parametrize("address", [*REMOTE, *MALFORMED])
def test_an_address_beyond_this_machine_needs_insecure_and_a_malformed_one_is_refused(address: str) -> None:
    is_remote = address in REMOTE
    reason = "transport.insecure=true" if is_remote else "expected ipc://PATH or tcp://HOST:PORT"
    for listens in (True, False):
        make = partial(ZeroMQTransport, address, NONCE, listens=listens, insecure=not is_remote)
        assert reason in refusal(make)


def test_a_draft_for_several_targets_stays_at_one_port() -> None:
    line = refusal(lambda: check_link(TransportConfig(), "tcp://127.0.0.1:0", "draft", "listen"))
    assert line == "listen=tcp://127.0.0.1:0: expected ipc://PATH or tcp://HOST:PORT, PORT from 1 to 65535"


@pytest.mark.parametrize("kind", ["shared_memory", "gloo", "nccl"])
def test_a_draft_elsewhere_is_reached_by_no_link_between_processes_of_one_target(kind: Any) -> None:
    """With a gloo link no lost draft would be replaced."""
    address = "tcp://127.0.0.1:5"
    line = refusal(lambda: check_link(TransportConfig(kind=kind), address, "target", "drafter.address"))
    assert line == f"transport.kind={kind}: not with drafter.address={address}; allowed: auto, zeromq"


# Links between machines admit only peers with the right key. Two loopback addresses stand for two hosts.


OTHER_NODE = "tcp://127.0.0.2:*"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ours") / "keys"
    write_keys(folder)
    return folder


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("others") / "keys"
    write_keys(folder)
    return folder


@pytest.fixture
def guarded(folder: Path) -> Iterator[ZeroMQTransport]:
    guarded = ZeroMQTransport(OTHER_NODE, NONCE, listens=True, keys=read_keys(folder, "draft"))
    yield guarded
    guarded.close()


@contextmanager
def coming(address: str, keys: Path | None) -> Iterator[ZeroMQTransport]:
    """The target's end, which has begun to speak."""
    link = connect(TransportConfig(address=address, keys=None if keys is None else str(keys)), address, NONCE)
    assert isinstance(link, ZeroMQTransport)
    with closing(link):
        link.send(VERDICT)
        yield link


def wait_for_refusal(*ends: ZeroMQTransport) -> None:
    deadline = time.monotonic() + DEADLINE
    while any(end.refusal is None for end in ends):
        assert [end.receive(0.01) for end in ends] == [None] * len(ends)
        assert time.monotonic() < deadline


@pytest.mark.parametrize("keys", ["other", "none"])
def test_a_target_with_another_key_or_none_is_refused_in_one_line_and_the_draft_waits_on(
    guarded: ZeroMQTransport, folder: Path, other_folder: Path, keys: str, caplog: pytest.LogCaptureFixture
) -> None:
    with coming(guarded.address, other_folder if keys == "other" else None) as target:
        wait_for_refusal(guarded, target)
        for end in (guarded, target):
            assert end.refusal.startswith("tcp://127.0.0.2:")
            assert end.refusal.endswith("both ends need transport.keys, from one `amusd keys`, or neither")
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert all(": refused: " in warning for warning in warnings)
    with coming(guarded.address, folder):
        assert expect(guarded) == VERDICT


@pytest.mark.parametrize("wrong", ["a target that is not on the list", "a target that takes another for its draft"])
def test_both_ends_check_keys(guarded: ZeroMQTransport, folder: Path, other_folder: Path, wrong: str) -> None:
    ours, theirs = read_keys(folder, "target"), read_keys(other_folder, "target")
    unknown = dataclasses.replace(theirs, peer=ours.peer)
    misled = dataclasses.replace(ours, peer=theirs.peer)
    link = ZeroMQTransport(guarded.address, NONCE, keys=unknown if "list" in wrong else misled, listens=False)
    link.send(VERDICT)
    wait_for_refusal(guarded, link)
    link.close()


def test_the_peer_is_served_while_strangers_hold_connections(guarded: ZeroMQTransport, folder: Path) -> None:
    place = ("127.0.0.2", int(guarded.address.rpartition(":")[2]))
    with socket.create_connection(place), socket.create_connection(place) as loud:
        loud.sendall(b"GET / HTTP/1.1\r\n\r\n")
        link = ZeroMQTransport(guarded.address, NONCE, keys=read_keys(folder, "target"), listens=False)
        for sender, receiver in ((link, guarded), (guarded, link)):
            sender.send(VERDICT)
            assert expect(receiver) == VERDICT
        link.close()


@pytest.mark.parametrize("comes_in", [True, False])
def test_a_rank_of_the_target_proves_to_have_its_key_and_a_draft_is_none(folder: Path, comes_in: bool) -> None:
    with socket.create_server(("127.0.0.2", 0)) as probe:
        address = f"tcp://127.0.0.2:{probe.getsockname()[1] - 1}"
    config = TransportConfig(address=address, keys=str(folder))
    first = numbered_link(config, address, 1, listens=True)
    if comes_in:
        other = numbered_link(config, address, 1, listens=False)
    else:
        keys = dataclasses.replace(read_keys(folder, "draft"), peer=read_keys(folder, "target").public)
        other = ZeroMQTransport(first.address, 0, keys=keys, listens=False)
    other.send_frame(b"ready")
    if comes_in:
        assert first.receive_frame(DEADLINE) == b"ready"
    else:
        wait_for_refusal(first)
    other.close()
    first.close()


def test_keys_are_files_that_only_this_user_can_read(folder: Path) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    secrets = dict.fromkeys(("target.key_secret", "draft.key_secret"), 0o600)
    assert modes == secrets | {"target.key": 0o644, "draft.key": 0o644}


def test_new_keys_never_take_the_place_of_others(folder: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError, match="not empty; name a new folder"):
        write_keys(folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    with pytest.raises(ConfigError, match="cannot be used"):
        write_keys(Path("/proc/nowhere"))


MISTAKES = {
    "no folder": ("nothing", lambda folder: None, "draft.key_secret: no keys in it; `amusd keys FOLDER`"),
    "an open secret": ("keys", lambda folder: (folder / "draft.key_secret").chmod(0o640), "mode 040.; chmod 600 it"),
    "a key of other letters": (
        "keys",
        lambda folder: (folder / "draft.key_secret").write_text(
            f'public-key = "{"~" * 40}"\nsecret-key = "{"~" * 40}"\n'
        ),
        "cannot be used: Invalid argument",
    ),
    "a key too long": (
        "keys",
        lambda folder: (folder / "target.key").write_text(f'public-key = "{"a" * 41}"\n'),
        "target.key: no keys in it",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_keys_that_cannot_work_are_one_line_before_anything_listens(tmp_path: Path, mistake: str) -> None:
    name, spoil, message = MISTAKES[mistake]
    write_keys(tmp_path / "keys")
    spoil(tmp_path / "keys")
    config = TransportConfig(address=OTHER_NODE, keys=str(tmp_path / name))
    assert re.search(message, refusal(lambda: listen(config, OTHER_NODE)))


def test_keys_open_an_address_beyond_this_machine_and_belong_to_an_address(folder: Path) -> None:
    ZeroMQTransport("tcp://0.0.0.0:*", NONCE, listens=True, keys=read_keys(folder, "draft")).close()
    for settings in ({}, {"address": "tcp://10.0.0.1:1", "insecure": True}):
        reason = r"(protects the link at transport\.address|not with transport\.insecure)"
        with pytest.raises(ConfigError, match=rf"^transport\.keys=.*: {reason}"):
            EngineConfig(transport=TransportConfig(keys=str(folder), **settings))
