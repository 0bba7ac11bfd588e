"""A link between two processes of one machine: a ring of shared memory in each direction, and a socket for wake-ups.

* The ends meet at a socket file in a private folder. The connecting end makes the memory and hands it over; then the
  file is removed. A killed listening end leaves the file behind, and the next one replaces it.
* The peer can read a message as soon as `send` has returned.
* A receiver spins (`base.spin_then_sleep`), then sleeps until the socket has a byte: each message sends one.
* The socket ends with the peer's process. A stopped process is slow, not lost.
"""

from __future__ import annotations

import os
import select
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from amusd.errors import ConfigError, PeerLostError
from amusd.transport.base import CLOSED, CLOSED_BY_PEER, LOOK_SECONDS, Transport, spin_then_sleep
from amusd.transport.ring import RING_BYTES, Rings, make_memory

SHARED_MEMORY = "shm://"
"""Scheme of the link's address, which no setting names."""
MEMORY_SECONDS = 0.1
"""How long a connected peer may take to hand over the memory."""


class SharedMemoryTransport(Transport):
    """A `Transport` to another process. Make it with `bind` or `connect`, neither of which waits."""

    def __init__(self, address: str, nonce: int | None, connection: socket.socket, rings: Rings | None = None) -> None:
        """`connection`: the socket to the peer; without `rings`, the listening socket, whose peer brings the rings."""
        super().__init__(address, nonce)
        self._rings = rings
        self._connection = connection
        self._poller = select.poll()
        self._poller.register(connection, select.POLLIN)
        self._next_look = 0.0
        self._loss: str | None = None
        self._is_closed = False

    @classmethod
    def bind(cls, address: str, nonce: int | None = None) -> SharedMemoryTransport:
        """The listening end, in a private folder. Raises ConfigError where the platform cannot do this."""
        path = Path(address.removeprefix(SHARED_MEMORY))
        with ExitStack() as failing:
            try:
                path.unlink(missing_ok=True)
                listening = failing.enter_context(socket.socket(socket.AF_UNIX))
                listening.setblocking(False)
                listening.bind(str(path))
                listening.listen(1)
            except (AttributeError, OSError) as error:
                raise ConfigError(f"transport=shared_memory: not here, use transport=zeromq: {error}") from None
            failing.pop_all()
        return cls(address, nonce, listening)

    @classmethod
    def connect(cls, address: str, nonce: int | None) -> SharedMemoryTransport | None:
        """The connecting end; None if no peer listens at `address` yet. Raises ConfigError if it cannot be made."""
        with ExitStack() as failing:
            try:
                connection = failing.enter_context(socket.socket(socket.AF_UNIX))
                connection.setblocking(False)
                with suppress(FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                    connection.connect(address.removeprefix(SHARED_MEMORY))
                    memory = make_memory()
                    try:
                        rings = Rings.map(memory, 0)
                        socket.send_fds(connection, [b"\0"], [memory])
                    finally:
                        os.close(memory)
                    failing.pop_all()
                    return cls(address, nonce, connection, rings)
            except OSError as error:
                raise ConfigError(f"transport=shared_memory: no link can be made: {error}") from None
        return None

    def send_frame(self, frame: bytes) -> None:
        """See `Transport`."""
        self._admit()
        if self._loss is not None or self._rings is None:
            raise PeerLostError(self._loss or "no peer has come")
        if not self._rings.put(frame):
            raise PeerLostError(f"the peer stopped reading: {RING_BYTES >> 20} MiB of messages wait for it")
        try:
            self._connection.send(b"\0")
        except BlockingIOError:
            pass  # unread bytes wake the peer
        except OSError:
            self._lose(CLOSED_BY_PEER)  # the next call raises

    def has_room(self, num_bytes: int) -> bool:
        """See `Transport`."""
        try:
            return self._loss is not None or self._rings is None or self._rings.has_room(num_bytes)
        except PeerLostError:
            return True  # `send` raises the reason

    def receive_frame(self, timeout: float) -> bytes | None:
        """See `Transport`."""
        if self._is_closed:
            raise PeerLostError(self._loss)
        deadline = time.monotonic() + timeout
        while self._rings is None or (frame := self._rings.take()) is None:
            now = time.monotonic()
            if now >= self._next_look:
                self._look()
                if self._has_news():  # frames sent before the peer closed
                    continue
                if self._loss is not None:
                    raise PeerLostError(self._loss)
            if now >= deadline:
                return None
            if spin_then_sleep(self._has_news, self._poller.poll, deadline):
                self._next_look = 0.0
        return frame

    def close(self) -> None:
        """See `Link`. The peer can still read sent frames."""
        if self._is_closed:
            return
        self._is_closed = True
        self._lose(CLOSED)
        if self._rings is None:
            self._stop_listening()
        else:
            self._rings.close()
        self._connection.close()

    def _has_news(self) -> bool:
        return self._rings is not None and self._rings.has_news()

    def _look(self) -> None:
        self._admit()
        if self._rings is not None and self._loss is None:
            self._next_look = time.monotonic() + LOOK_SECONDS
            if not _is_connected(self._connection):
                self._lose(CLOSED_BY_PEER)

    def _admit(self) -> None:
        """Accept the peer that brings its memory, and stop listening. Connections without memory are closed."""
        if self._rings is not None or self._is_closed:
            return
        with ExitStack() as failing, suppress(OSError, ValueError):
            connection = failing.enter_context(self._connection.accept()[0])
            connection.settimeout(MEMORY_SECONDS)
            _, (memory, *_), *_ = socket.recv_fds(connection, 1, 1)
            try:
                self._rings = Rings.map(memory, 1)
            finally:
                os.close(memory)
            failing.pop_all()
            connection.setblocking(False)
            self._poller.unregister(self._connection)
            self._poller.register(connection, select.POLLIN)
            self._stop_listening()
            self._connection = connection

    def _stop_listening(self) -> None:
        self._connection.close()
        Path(self.address.removeprefix(SHARED_MEMORY)).unlink(missing_ok=True)

    def _lose(self, reason: str) -> None:
        self._loss = reason
        self._next_look = 0.0


def _is_connected(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(4096))
    except BlockingIOError:
        return True
    except OSError:
        return False
