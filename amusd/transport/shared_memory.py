"""A link between two processes of one machine: a ring of shared memory in each direction, and a socket for wake-ups.

* They meet in a private folder with a socket file and a link to the target's memory, which is removed once the peer has
  come. An end that is killed while it waits leaves it behind.
* A message is in the peer's reach when `send` returns.
* A receiver spins (`base.spin_then_sleep`), then sleeps until the socket has a byte: each message rings once.
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
from amusd.files import make_socket_folder
from amusd.transport.base import CLOSED, CLOSED_BY_PEER, LOOK_SECONDS, Transport, spin_then_sleep
from amusd.transport.ring import RING_BYTES, Rings, make_memory

SHARED_MEMORY = "shm://"
"""Scheme of the link's address, which is picked, never configured."""


class SharedMemoryTransport(Transport):
    """A `Transport` to another process. Make it with `bind` or `connect`, neither of which waits."""

    def __init__(
        self, nonce: int, address: str, rings: Rings, connection: socket.socket, door: ExitStack | None = None
    ) -> None:
        """`connection`: the socket to the peer, or with `door` the listening one.

        `door`: closes that socket, the memory's descriptor and the folder once the peer has come.
        """
        super().__init__(address, nonce)
        self._rings = rings
        self._connection = connection
        self._door = door
        self._poller = select.poll()
        self._poller.register(connection, select.POLLIN)
        self._next_look = 0.0
        self._loss: str | None = None
        self._is_closed = False

    @classmethod
    def bind(cls, nonce: int) -> SharedMemoryTransport:
        """The listening end, in a private folder. Raises ConfigError where the platform cannot do this."""
        with ExitStack() as door:
            try:
                folder = Path(make_socket_folder())
                door.callback(_remove, folder)
                listening = door.enter_context(socket.socket(socket.AF_UNIX))
                listening.setblocking(False)
                listening.bind(str(folder / "link"))
                listening.listen(1)
                memory = make_memory()
                door.callback(os.close, memory)
                (folder / "memory").symlink_to(f"/proc/{os.getpid()}/fd/{memory}")
                rings = Rings.map(memory, 0)
            except (AttributeError, OSError) as error:
                raise ConfigError(f"transport=shared_memory: not here, use transport=zeromq: {error}") from None
            return cls(nonce, f"{SHARED_MEMORY}{folder}/link", rings, listening, door.pop_all())

    @classmethod
    def connect(cls, address: str, nonce: int) -> SharedMemoryTransport:
        """The other end. Raises ConfigError without a listener at `address` on this machine."""
        path = Path(address.removeprefix(SHARED_MEMORY))
        with ExitStack() as failing:
            try:
                with path.with_name("memory").open("r+b", buffering=0) as memory:
                    rings = Rings.map(memory.fileno(), 1)
                connection = failing.enter_context(socket.socket(socket.AF_UNIX))
                connection.setblocking(False)
                connection.connect(str(path))  # last: then the listening end removes the folder
            except (OSError, ValueError) as error:
                message = f"the target does not listen at {address}: it has ended, or runs on another machine"
                raise ConfigError(f"{message} ({error}); transport.address links machines") from None
            failing.pop_all()
        return cls(nonce, address, rings, connection)

    def send_frame(self, frame: bytes) -> None:
        """Put bytes into the ring. Raises PeerLostError."""
        self._admit()
        if self._loss is not None:
            raise PeerLostError(self._loss)
        if not self._rings.put(frame):
            raise PeerLostError(f"the peer stopped reading: {RING_BYTES >> 20} MiB of messages wait for it")
        try:
            self._connection.send(b"\0")
        except BlockingIOError:
            pass  # there are bytes enough to wake it
        except OSError:
            self._lose(CLOSED_BY_PEER)  # which the next call says

    def has_room(self, num_bytes: int) -> bool:
        """See `Transport`."""
        try:
            return self._loss is not None or self._rings.has_room(num_bytes)
        except PeerLostError:
            return True  # `send` says what is wrong

    def receive_frame(self, timeout: float) -> bytes | None:
        """The next bytes, or None after `timeout` seconds. Raises PeerLostError."""
        if self._is_closed:
            raise PeerLostError(self._loss)
        deadline = time.monotonic() + timeout
        while (frame := self._rings.take()) is None:
            now = time.monotonic()
            if now >= self._next_look:
                self._look()
                if self._rings.has_news():  # what the peer sent before it went can be read now
                    continue
                if self._loss is not None:
                    raise PeerLostError(self._loss)
            if now >= deadline:
                return None
            if spin_then_sleep(self._rings.has_news, self._poller.poll, deadline):
                self._next_look = 0.0
        return frame

    def close(self) -> None:
        """Release everything. Idempotent; never raises; the peer keeps what was sent to it."""
        if self._is_closed:
            return
        self._is_closed = True
        self._lose(CLOSED)
        self._rings.close()
        self._connection.close()
        if self._door is not None:
            self._door.close()

    def _look(self) -> None:
        self._admit()
        if self._door is None and self._loss is None:
            self._next_look = time.monotonic() + LOOK_SECONDS
            if not _is_connected(self._connection):
                self._lose(CLOSED_BY_PEER)

    def _admit(self) -> None:
        """Take in the peer that has come; the door closes behind it."""
        if self._door is None:
            return
        try:
            connection, _ = self._connection.accept()
        except OSError:
            return
        connection.setblocking(False)
        self._poller.unregister(self._connection)
        self._poller.register(connection, select.POLLIN)
        self._connection = connection
        self._door.close()
        self._door = None

    def _lose(self, reason: str) -> None:
        self._loss = reason
        self._next_look = 0.0


def _remove(folder: Path) -> None:
    with suppress(OSError):  # not by `shutil.rmtree`, which needs a descriptor
        for name in ("link", "memory"):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _is_connected(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(4096))
    except BlockingIOError:
        return True
    except OSError:
        return False
