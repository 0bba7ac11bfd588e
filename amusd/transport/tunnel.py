"""A socket file of one machine on another: streams of bytes through ZeroMQ, with the keys of the link.

The ranks of a model meet at a socket file of the first one (`models/ranks.py`). For ranks on other machines the first
one's machine has a `Tunnel.listen`, and each of the others a `Tunnel.connect`, which serves a socket file of the same
name. A connection that is made there is made at the first one's file, too, and what goes into either comes out of the
other. So a rank knows socket files alone, and one machine needs no tunnel.

* With keys every byte is encrypted, and only owners of the listed keys come in (`curve.py`).
* A connection that ends at one end is ended at the other, also where its process was killed. libzmq's own threads show
  that both ends live; the connections of an end that is silent for `SILENCE_SECONDS` are ended: a cable was cut, or a
  machine is gone.
* One thread and one ZeroMQ socket at each end carry everything. Commands are small and rare beside what ranks compute.

A frame is [the other end's name, where several share the socket], the connection's number, its kind, and data.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from amusd.errors import ConfigError
from amusd.transport.curve import Keys, ask_with, serve_with

ZMQSocket: TypeAlias = "zmq.Socket[bytes]"
Key: TypeAlias = tuple[bytes, ...]
"""What the frames of a connection begin with."""

CONNECT_SECONDS = 10.0
"""Longest wait for the first answer of the other end."""
SILENCE_SECONDS = 5.0
"""An end that has been silent for so long is gone."""
_SIGN_SECONDS = 1.0
"""How often the listening end looks whether the others are there: only a frame to one that is gone tells."""
_LOOK_MS = 100
_LAST_SECONDS = 1.0
"""How long the end of a connection may wait for what came before it."""
_CHUNK_BYTES = 65_536
_OPEN, _DATA, _END, _SIGN = b"o", b"d", b"e", b"s"
"""Kinds of frames; a sign also asks whether somebody is there."""
_NOBODY = (b"",)
"""The `Key` of no connection."""
_WATCHED_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


@dataclass(eq=False)
class _Stream:
    """A connection at a socket file."""

    connection: socket.socket
    unsent: bytearray = field(default_factory=bytearray)
    """What the process at the socket file has not read yet."""

    def flush(self) -> None:
        """Hand over as much as it takes now. Raises OSError."""
        with suppress(BlockingIOError):
            while self.unsent:
                del self.unsent[: self.connection.send(self.unsent)]


class Tunnel:
    """One end; make it with `listen` or `connect`, and `close` it. Works in a thread of its own."""

    def __init__(self, way: ZMQSocket, address: str, file: Path) -> None:
        self.address = address
        """`tcp://HOST:PORT` of the listening end."""
        self.file = file
        """The socket file: the first rank's, or the copy that is served here."""
        self.is_lost = False
        """A connection has ended because its other end was gone or silent."""
        self._way = way
        self._streams: dict[Key, _Stream] = {}
        self._num_admitted = 0
        self._door: socket.socket | None = None
        """The copy of the file; None at the listening end."""
        self._monitor: ZMQSocket | None = None
        """Tells when the way to the listening end ends and begins."""
        self._is_connected = True
        self._is_closing = threading.Event()
        self._authenticator: ThreadAuthenticator | None = None
        self._thread = threading.Thread(target=self._run, name="amusd-tunnel", daemon=True)

    @classmethod
    def listen(cls, host: str, file: Path, keys: Keys | None) -> Tunnel:
        """Let in connections to `file`, a socket file of this machine, at a free port of `host`, one of its addresses.

        Without keys whoever reaches the port comes in. Raises `ConfigError`.
        """
        way = _new_way(zmq.ROUTER)
        way.set(zmq.ROUTER_MANDATORY, 1)
        tunnel = cls(way, "", file)
        try:
            if keys is not None:
                tunnel._authenticator = serve_with(way, keys)
            tunnel.address = f"tcp://{host}:{way.bind_to_random_port(f'tcp://{host}')}"
        except zmq.ZMQError as error:
            tunnel._release()
            raise ConfigError(f"transport.interface: cannot listen at {host} for other ranks: {error}") from None
        tunnel._thread.start()
        return tunnel

    @classmethod
    def connect(cls, address: str, file: Path, keys: Keys | None) -> Tunnel:
        """Serve `file`, a new socket file, for connections that end at the file behind `address`.

        Raises `ConfigError` where nobody answers there within `CONNECT_SECONDS`.
        """
        way = _new_way(zmq.DEALER)
        tunnel = cls(way, address, file)
        try:
            tunnel._monitor = way.get_monitor_socket(_WATCHED_EVENTS)
            if keys is not None:
                ask_with(way, keys)
            way.connect(address)
            tunnel._greet(tunnel._monitor)
            tunnel._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            tunnel._door.bind(str(file))
            tunnel._door.listen()
        except BaseException:
            tunnel._release(linger=0.0)
            raise
        tunnel._thread.start()
        return tunnel

    def close(self, patience: float = SILENCE_SECONDS) -> None:
        """End all connections; what is left to do after `patience` seconds is left to the thread. Idempotent."""
        self._is_closing.set()
        self._thread.join(patience)

    def _greet(self, monitor: ZMQSocket) -> None:
        """Have one answer of the listening end. Raises `ConfigError`."""
        deadline, was_reached = time.monotonic() + CONNECT_SECONDS, False
        self._way.send_multipart([*_NOBODY, _SIGN, b""])
        while (left := deadline - time.monotonic()) > 0:
            if monitor.poll(min(int(left * 1e3), _LOOK_MS) if was_reached else int(left * 1e3)):
                was_reached |= recv_monitor_message(monitor)["event"] == zmq.EVENT_CONNECTED
            if self._way.poll(0):
                self._way.recv_multipart()
                return
        reason = "reached, but the two sides' transport.keys do not fit" if was_reached else "the port is not reachable"
        raise ConfigError(f"{self.address}: no answer of rank 0 within {CONNECT_SECONDS:g} seconds: {reason}")

    def _run(self) -> None:
        """Carry frames until `close`. All sockets are this thread's from now on."""
        next_sign = 0.0
        try:
            while not self._is_closing.is_set():
                for ready in self._ready():
                    ready()
                if self._door is None and time.monotonic() >= next_sign:
                    next_sign = time.monotonic() + _SIGN_SECONDS
                    for key in tuple(self._streams):
                        self._send(key, _SIGN)
            for key in tuple(self._streams):
                self._send(key, _END)
                self._end(key)
        finally:
            self._release()

    def _ready(self) -> list[Callable[[], None]]:
        """Return what is to be done now, or within a moment: a call for each socket that can be read."""
        calls: dict[ZMQSocket | int, Callable[[], None]] = {self._way: self._carry_in}
        if self._monitor is not None:
            calls[self._monitor] = partial(self._watch, self._monitor)
        if self._door is not None:
            calls[self._door.fileno()] = partial(self._admit, self._door)
        for key, stream in self._streams.items():
            calls[stream.connection.fileno()] = partial(self._carry_out, key)
        poller = zmq.Poller()
        unsent = {stream.connection.fileno() for stream in self._streams.values() if stream.unsent}
        for source in calls:
            poller.register(source, zmq.POLLIN | zmq.POLLOUT if source in unsent else zmq.POLLIN)
        return [calls[source] for source, _ in poller.poll(_LOOK_MS)]

    def _watch(self, monitor: ZMQSocket) -> None:
        """Where the way has ended, end what it carries; what has come before is handed over."""
        event = recv_monitor_message(monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._is_connected = True
        elif event == zmq.EVENT_DISCONNECTED:
            self._is_connected = False
            self._carry_in()
            for key in tuple(self._streams):
                self._lose(key)

    def _admit(self, door: socket.socket) -> None:
        """Begin a connection that was made at the copy of the file."""
        self._num_admitted += 1
        key = (self._num_admitted.to_bytes(4, "big"),)
        self._begin(key, door.accept()[0])
        if self._is_connected:
            self._send(key, _OPEN)
        else:
            self._lose(key)

    def _begin(self, key: Key, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._streams[key] = _Stream(connection)

    def _carry_out(self, key: Key) -> None:
        """Send what the process at the socket file has said, and hand over what waits for it."""
        stream = self._streams.get(key)
        if stream is None:
            return
        data = b""
        try:
            stream.flush()
            data = stream.connection.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:  # it has ended
            pass
        self._send(key, _DATA if data else _END, data)
        if not data:
            self._end(key)

    def _carry_in(self) -> None:
        """Hand over what the other ends have said."""
        with suppress(zmq.ZMQError):  # there is no more
            while True:
                frame = self._way.recv_multipart(zmq.NOBLOCK)
                if len(frame) > len(_NOBODY) + 1:  # else it is not of a tunnel
                    *key, kind, data = frame
                    self._handle(tuple(key), kind, data)

    def _handle(self, key: Key, kind: bytes, data: bytes) -> None:
        stream = self._streams.get(key)
        if stream is None:
            if self._door is None and not (kind == _OPEN and self._knock(key)):
                with suppress(zmq.ZMQError):  # it has gone
                    self._way.send_multipart([*key, _SIGN if kind == _SIGN else _END, b""], zmq.NOBLOCK)
            return
        try:
            if kind == _DATA:
                stream.unsent += data
                stream.flush()
        except OSError:
            self._send(key, _END)
            kind = _END
        if kind == _END:
            self._end(key)

    def _knock(self, key: Key) -> bool:
        """Make a connection at the first rank's file for a new one elsewhere."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(self.file))
        except OSError:  # it awaits no more
            connection.close()
            return False
        self._begin(key, connection)
        return True

    def _send(self, key: Key, kind: bytes, data: bytes = b"") -> None:
        try:
            self._way.send_multipart([*key, kind, data], zmq.NOBLOCK)
        except zmq.ZMQError:  # the other end has gone, or reads nothing
            self._lose(key)

    def _lose(self, key: Key) -> None:
        self.is_lost = True
        self._end(key)

    def _end(self, key: Key) -> None:
        stream = self._streams.pop(key, None)
        if stream is not None:
            with stream.connection, suppress(OSError):
                stream.connection.settimeout(_LAST_SECONDS)
                stream.connection.sendall(stream.unsent)

    def _release(self, linger: float = _LAST_SECONDS) -> None:
        if self._door is not None:
            self._door.close()
            self.file.unlink(missing_ok=True)
        if self._monitor is not None:
            self._way.disable_monitor()
            self._monitor.close(linger=0)
        self._way.close(linger=int(1e3 * linger))
        if self._authenticator is not None:
            self._authenticator.stop()
        self._way.context.term()


def _new_way(kind: int) -> ZMQSocket:
    """A socket in a context of its own that finds out when the other end is gone."""
    way: ZMQSocket = zmq.Context().socket(kind)
    way.set(zmq.MAXMSGSIZE, 2 * _CHUNK_BYTES)
    way.set(zmq.CONNECT_TIMEOUT, int(1e3 * SILENCE_SECONDS))
    way.set(zmq.HANDSHAKE_IVL, int(1e3 * SILENCE_SECONDS))
    way.set(zmq.HEARTBEAT_IVL, int(1e3 * _SIGN_SECONDS))
    way.set(zmq.HEARTBEAT_TIMEOUT, int(1e3 * SILENCE_SECONDS))
    return way
