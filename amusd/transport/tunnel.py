"""A socket file of one machine on another: streams of bytes through ZeroMQ, with the keys of the link.

The ranks of a model meet at a socket file of the first one (`models/ranks.py`). For ranks on other machines the first
one's machine has a `Tunnel.listen`, and each of the others a `Tunnel.connect`, which serves a socket file of the same
name. A connection that is made there is made at the first one's file, too, and what goes into either comes out of the
other. So a rank knows socket files alone, and one machine needs no tunnel.

* With keys every byte is encrypted, and only owners of the listed keys come in (`curve.py`).
* A connection that ends at one end is ended at the other, also where its process was killed. libzmq's own threads show
  that both ends live; a connection whose other end is silent for `SILENCE_SECONDS` is ended: a cable was cut, or a
  machine is gone.
* One thread carries everything. Commands are small and rare beside what ranks compute.
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

CONNECT_SECONDS = 10.0
"""Longest wait for the first answer of the other end."""
SILENCE_SECONDS = 5.0
"""An end that has been silent for so long is gone."""
_SIGN_SECONDS = 1.0
"""How often the listening end looks whether the others are there: only a frame to one that is gone tells."""
_LOOK_MS = 250
_LAST_SECONDS = 1.0
"""How long the end of a connection may wait for what came before it."""
_CHUNK_BYTES = 65_536
_OPEN, _DATA, _END, _SIGN = b"o", b"d", b"e", b"s"
"""The first byte of a frame; a sign also asks whether somebody is there."""


@dataclass(eq=False)
class _Stream:
    """A connection at a socket file, and the way to its other end."""

    connection: socket.socket
    way: ZMQSocket
    prefix: list[bytes]
    """What a frame begins with: the other end's name where several share the way."""
    monitor: ZMQSocket | None = None
    """Tells the end of a way that is this connection's own."""
    unsent: bytearray = field(default_factory=bytearray)
    """What the process at the socket file has not read yet."""

    def flush(self) -> None:
        """Hand over as much as it takes now. Raises OSError."""
        with suppress(BlockingIOError):
            while self.unsent:
                del self.unsent[: self.connection.send(self.unsent)]


class Tunnel:
    """One end; make it with `listen` or `connect`, and `close` it. Works in a thread of its own."""

    def __init__(self, context: zmq.Context[ZMQSocket], address: str, file: Path, keys: Keys | None) -> None:
        self.address = address
        """`tcp://HOST:PORT` of the listening end."""
        self.file = file
        """The socket file: the first rank's, or the copy that is served here."""
        self.is_lost = False
        """A connection has ended because its other end was gone or silent."""
        self._context = context
        self._keys = keys
        self._streams: set[_Stream] = set()
        self._router: ZMQSocket | None = None
        self._door: socket.socket | None = None
        self._is_closing = threading.Event()
        self._authenticator: ThreadAuthenticator | None = None
        self._thread = threading.Thread(target=self._run, name="amusd-tunnel", daemon=True)

    @classmethod
    def listen(cls, host: str, file: Path, keys: Keys | None) -> Tunnel:
        """Let in connections to `file`, a socket file of this machine, at a free port of `host`, one of its addresses.

        Without keys whoever reaches the port comes in. Raises `ConfigError`.
        """
        context: zmq.Context[ZMQSocket] = zmq.Context()
        router = context.socket(zmq.ROUTER)
        _limit(router)
        authenticator = None if keys is None else serve_with(router, keys)
        router.set(zmq.ROUTER_MANDATORY, 1)
        try:
            port = router.bind_to_random_port(f"tcp://{host}")
        except zmq.ZMQError as error:
            if authenticator is not None:
                authenticator.stop()
            context.destroy(linger=0)
            raise ConfigError(f"transport.interface: cannot listen at {host} for other ranks: {error}") from None
        tunnel = cls(context, f"tcp://{host}:{port}", file, keys)
        tunnel._router, tunnel._authenticator = router, authenticator
        tunnel._thread.start()
        return tunnel

    @classmethod
    def connect(cls, address: str, file: Path, keys: Keys | None) -> Tunnel:
        """Serve `file`, a new socket file, for connections that end at the file behind `address`.

        Raises `ConfigError` where nobody answers there within `CONNECT_SECONDS`.
        """
        context: zmq.Context[ZMQSocket] = zmq.Context()
        tunnel = cls(context, address, file, keys)
        try:
            tunnel._greet()
            tunnel._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            tunnel._door.bind(str(file))
            tunnel._door.listen()
        except BaseException:
            tunnel._release()
            raise
        tunnel._thread.start()
        return tunnel

    def close(self) -> None:
        """End all connections. Idempotent."""
        self._is_closing.set()
        self._thread.join(SILENCE_SECONDS)

    def _greet(self) -> None:
        """Have one answer of the listening end. Raises `ConfigError`."""
        way = self._new_way()
        monitor = way.get_monitor_socket()
        deadline, was_reached, heard = time.monotonic() + CONNECT_SECONDS, False, False
        way.send(_SIGN)
        while not heard and (left := deadline - time.monotonic()) > 0:
            if monitor.poll(min(int(left * 1e3), _LOOK_MS) if was_reached else int(left * 1e3)):
                was_reached |= recv_monitor_message(monitor)["event"] == zmq.EVENT_CONNECTED
            heard = bool(way.poll(0))
        way.disable_monitor()
        monitor.close(linger=0)
        way.close(linger=0)
        if not heard:
            reason = (
                "reached, but the two sides' transport.keys do not fit" if was_reached else "the port is not reachable"
            )
            raise ConfigError(f"{self.address}: no answer of rank 0 within {CONNECT_SECONDS:g} seconds: {reason}")

    def _new_way(self) -> ZMQSocket:
        way = self._context.socket(zmq.DEALER)
        _limit(way)
        if self._keys is not None:
            ask_with(way, self._keys)
        way.connect(self.address)
        return way

    def _run(self) -> None:
        """Carry frames until `close`. All sockets are this thread's from now on."""
        next_sign = 0.0
        try:
            while not self._is_closing.is_set():
                for ready in self._ready():
                    ready()
                if self._router is not None and time.monotonic() >= next_sign:
                    next_sign = time.monotonic() + _SIGN_SECONDS
                    for stream in tuple(self._streams):
                        self._send(stream, _SIGN)
            for stream in tuple(self._streams):
                self._send(stream, _END)
                self._end(stream)
        finally:
            self._release()

    def _ready(self) -> list[Callable[[], None]]:
        """What is to be done now, or within a moment: a call for each socket that can be read."""
        calls: dict[ZMQSocket | int, Callable[[], None]] = {}
        if self._door is not None:
            calls[self._door.fileno()] = self._admit
        if self._router is not None:
            calls[self._router] = partial(self._carry_in, self._router)
        for stream in self._streams:
            calls[stream.connection.fileno()] = partial(self._carry_out, stream)
            if stream.monitor is not None:
                calls[stream.way] = partial(self._carry_in, stream.way)
                calls[stream.monitor] = partial(self._lose, stream)
        poller = zmq.Poller()
        unsent = {stream.connection.fileno() for stream in self._streams if stream.unsent}
        for source in calls:
            poller.register(source, zmq.POLLIN | zmq.POLLOUT if source in unsent else zmq.POLLIN)
        return [calls[source] for source, _ in poller.poll(_LOOK_MS)]

    def _admit(self) -> None:
        """Begin a connection that was made at the copy of the file."""
        assert self._door is not None
        connection, _ = self._door.accept()
        way = self._new_way()
        monitor = way.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        stream = self._begin(_Stream(connection, way, [], monitor))
        self._send(stream, _OPEN)

    def _begin(self, stream: _Stream) -> _Stream:
        stream.connection.setblocking(False)
        self._streams.add(stream)
        return stream

    def _lose(self, stream: _Stream) -> None:
        """The way has ended; what has come before is handed over."""
        self._carry_in(stream.way)
        if stream in self._streams:
            self.is_lost = True
            self._end(stream)

    def _carry_out(self, stream: _Stream) -> None:
        """Send what the process at the socket file has said, and hand over what waits for it."""
        if stream not in self._streams:
            return
        data = b""
        try:
            stream.flush()
            data = stream.connection.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:  # it has ended
            pass
        self._send(stream, _DATA + data if data else _END)
        if not data:
            self._end(stream)

    def _carry_in(self, way: ZMQSocket) -> None:
        """Hand over what the other ends have said."""
        with suppress(zmq.ZMQError):  # there is no more, or the way was closed meanwhile
            while True:
                *prefix, frame = way.recv_multipart(zmq.NOBLOCK)
                self._handle(way, prefix, frame)

    def _handle(self, way: ZMQSocket, prefix: list[bytes], frame: bytes) -> None:
        kind, data = frame[:1], frame[1:]
        stream = next((each for each in self._streams if each.way is way and each.prefix == prefix), None)
        if stream is None:
            if kind == _OPEN and self._knock(way, prefix):
                return
            with suppress(zmq.ZMQError):  # it has gone
                way.send_multipart([*prefix, _SIGN if kind == _SIGN else _END], zmq.NOBLOCK)
            return
        try:
            if kind == _DATA:
                stream.unsent += data
                stream.flush()
        except OSError:
            self._send(stream, _END)
            kind = _END
        if kind == _END:
            self._end(stream)

    def _knock(self, way: ZMQSocket, prefix: list[bytes]) -> bool:
        """Make a connection at the first rank's file for a new one elsewhere."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(self.file))
        except OSError:  # it awaits no more
            connection.close()
            return False
        self._begin(_Stream(connection, way, prefix))
        return True

    def _send(self, stream: _Stream, frame: bytes) -> None:
        try:
            stream.way.send_multipart([*stream.prefix, frame], zmq.NOBLOCK)
        except zmq.ZMQError:  # the other end has gone, or reads nothing
            self.is_lost = True
            self._end(stream)

    def _end(self, stream: _Stream) -> None:
        if stream in self._streams:
            self._streams.remove(stream)
            with stream.connection, suppress(OSError):
                stream.connection.settimeout(_LAST_SECONDS)
                stream.connection.sendall(stream.unsent)
            if stream.monitor is not None:
                stream.way.disable_monitor()
                stream.monitor.close(linger=0)
                stream.way.close(linger=int(1e3 * _LAST_SECONDS))

    def _release(self) -> None:
        if self._door is not None:
            self._door.close()
            self.file.unlink(missing_ok=True)
        if self._router is not None:
            self._router.close(linger=int(1e3 * _LAST_SECONDS))
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()


def _limit(way: ZMQSocket) -> None:
    way.set(zmq.MAXMSGSIZE, 2 * _CHUNK_BYTES)
    way.set(zmq.HEARTBEAT_IVL, int(1e3 * _SIGN_SECONDS))
    way.set(zmq.HEARTBEAT_TIMEOUT, int(1e3 * SILENCE_SECONDS))
