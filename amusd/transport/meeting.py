"""The meeting of the two ends of a shared-memory link, which exchange their memory; nothing here waits.

The listening end has a socket file in a folder that only this user can enter. The connecting end says the session's
nonce and passes a file descriptor of its memory along; the listening end answers with the same and removes the folder:
there is exactly one peer. Every other connection is refused, and does not take the peer's place.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from amusd.errors import ConfigError, PeerLostError, WireError
from amusd.transport.addresses import SHARED_MEMORY
from amusd.transport.ring import Area

_INTRODUCTION = struct.Struct("<8sQ")
_MAGIC = b"AMSDSHM1"
_MAX_GUESTS = 8  # connections that have not introduced themselves; the oldest makes room


def introduce(connection: socket.socket, nonce: int, own: Area) -> None:
    """Say which session this is and pass the memory on. Raises OSError."""
    assert own.descriptor is not None
    socket.send_fds(connection, [_INTRODUCTION.pack(_MAGIC, nonce)], [own.descriptor])


def read_introduction(connection: socket.socket, nonce: int) -> Area | None:
    """The other end's memory, or None when it has said nothing yet.

    Raises PeerLostError when it has gone, WireError when it is not the peer or its memory cannot be trusted.
    """
    try:
        text, descriptors, _, _ = socket.recv_fds(connection, _INTRODUCTION.size, 1)
    except BlockingIOError:
        return None
    except OSError as error:
        raise PeerLostError(f"the peer closed the link: {error}") from None
    try:
        if not text:
            raise PeerLostError("the peer closed the link")
        if text != _INTRODUCTION.pack(_MAGIC, nonce) or len(descriptors) != 1:
            raise WireError("its introduction is of another session")
        return Area.map(descriptors[0])
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


class Door:
    """The socket file of the listening end, until its peer has come."""

    def __init__(self, nonce: int) -> None:
        """Raises OSError where there are no socket files."""
        self._nonce = nonce
        self._guests: list[socket.socket] = []
        self._folder: Path | None = None
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="amusd-"))
            path = self._folder / "link"
            self.address = f"{SHARED_MEMORY}{path}"
            """Address of the socket file."""
            self._socket.setblocking(False)
            self._socket.bind(str(path))
            path.chmod(0o600)
            self._socket.listen(_MAX_GUESTS)
        except BaseException:
            self.close()
            raise

    def admit(self, refuse: Callable[[str], None]) -> tuple[socket.socket, Area] | None:
        """The peer's connection and memory, if it has come. `refuse` is told why another connection was closed."""
        with suppress(OSError):  # there are no more
            while True:
                connection, _ = self._socket.accept()
                connection.setblocking(False)
                self._guests.append(connection)
                if len(self._guests) > _MAX_GUESTS:
                    self._guests.pop(0).close()
                    refuse("it did not introduce itself")
        for guest in tuple(self._guests):
            try:
                area = read_introduction(guest, self._nonce)
            except (PeerLostError, WireError) as error:
                self._guests.remove(guest)
                guest.close()
                refuse(str(error))
                continue
            if area is not None:
                self._guests.remove(guest)
                return guest, area
        return None

    def wait(self, milliseconds: int) -> None:
        """Wait until there is a new connection or an introduction, at most this long."""
        poller = select.poll()
        for connection in (self._socket, *self._guests):
            poller.register(connection, select.POLLIN)
        poller.poll(milliseconds)

    def close(self) -> None:
        """Remove the folder and close all connections. Idempotent."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        for connection in (self._socket, *self._guests):
            connection.close()
        self._guests.clear()


def knock(address: str) -> socket.socket:
    """A connection to the door at `address`. Raises ConfigError when there is none."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.setblocking(False)
        connection.connect(address.removeprefix(SHARED_MEMORY))
    except OSError as error:
        connection.close()
        raise ConfigError(
            f"the target does not listen at {address} here ({error.strerror or error}): it has ended, or runs on "
            "another machine, which needs transport.address=tcp://HOST:PORT and transport.keys=FOLDER"
        ) from None
    return connection
