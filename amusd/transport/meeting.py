"""How the ends of a shared-memory link find each other and exchange their memory; nothing here waits.

The listening end has a socket file in a folder that only this user can enter. Whoever connects says the session's nonce
and passes a file descriptor of its memory along; the listening end answers with the same and takes the folder away:
there is exactly one peer. Anybody else is turned away, and does not take the peer's place.

The memory is an anonymous file: it has no name that could stay behind, it goes when both processes have gone, however
they ended, and it is sealed, so that no peer can shrink it under a reader. Linux only, as are its parts.
"""

from __future__ import annotations

import array
import fcntl
import mmap
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
from amusd.transport.ring import CONTROL_BYTES, RING_BYTES, Area

AREA_BYTES = CONTROL_BYTES + RING_BYTES

_INTRODUCTION = struct.Struct("<8sQ")
_MAGIC = b"AMSDSHM1"
_MAX_GUESTS = 8  # connections that have not said who they are; the oldest makes room


def create_area() -> tuple[int, Area]:
    """New memory, and the descriptor to pass on. Raises ConfigError where the platform cannot do this."""
    try:
        descriptor = os.memfd_create("amusd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as error:
        raise ConfigError(f"transport=shared_memory: not on this machine, use transport=zeromq: {error}") from None
    try:
        os.ftruncate(descriptor, AREA_BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())
        return descriptor, Area(mmap.mmap(descriptor, AREA_BYTES))
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"transport=shared_memory: no {AREA_BYTES >> 20} MiB of memory: {error}") from None


def introduce(connection: socket.socket, nonce: int, descriptor: int) -> None:
    """Say which session this is and pass the memory on. Raises OSError."""
    socket.send_fds(connection, [_INTRODUCTION.pack(_MAGIC, nonce)], [descriptor])


def read_introduction(connection: socket.socket, nonce: int) -> Area | None:
    """The other end's memory, or None when it has said nothing yet.

    Raises PeerLostError when it has gone, WireError when it is not the peer or its memory cannot be trusted.
    """
    try:
        text, ancillary, _, _ = connection.recvmsg(_INTRODUCTION.size, socket.CMSG_LEN(array.array("i").itemsize))
    except BlockingIOError:
        return None
    except OSError as error:
        raise PeerLostError(f"the peer closed the link: {error}") from None
    descriptors = _descriptors(ancillary)
    try:
        if not text:
            raise PeerLostError("the peer closed the link")
        if text != _INTRODUCTION.pack(_MAGIC, nonce) or len(descriptors) != 1:
            raise WireError("its introduction is of another session")
        return _map(descriptors[0])
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


class Door:
    """Where the listening end is found until its peer has come."""

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
            """Where to connect to."""
            self._socket.setblocking(False)
            self._socket.bind(str(path))
            path.chmod(0o600)
            self._socket.listen(_MAX_GUESTS)
        except BaseException:
            self.close()
            raise

    def admit(self, turn_away: Callable[[str], None]) -> tuple[socket.socket, Area] | None:
        """The peer's connection and memory, if it has come. `turn_away` hears why another was not let in."""
        with suppress(OSError):  # nobody more
            while True:
                connection, _ = self._socket.accept()
                connection.setblocking(False)
                self._guests.append(connection)
                if len(self._guests) > _MAX_GUESTS:
                    self._guests.pop(0).close()
                    turn_away("it did not introduce itself")
        for guest in tuple(self._guests):
            try:
                area = read_introduction(guest, self._nonce)
            except (PeerLostError, WireError) as error:
                self._guests.remove(guest)
                guest.close()
                turn_away(str(error))
                continue
            if area is not None:
                self._guests.remove(guest)
                return guest, area
        return None

    def wait(self, milliseconds: int) -> None:
        """Until somebody comes or says something, at most so long."""
        poller = select.poll()
        for connection in (self._socket, *self._guests):
            poller.register(connection, select.POLLIN)
        poller.poll(milliseconds)

    def close(self) -> None:
        """Take the folder away and turn everybody out. Idempotent."""
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


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)


def _map(descriptor: int) -> Area:
    try:
        is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() == _seals()
        if not is_sealed or os.fstat(descriptor).st_size != AREA_BYTES:
            raise WireError("its memory is of another size, or could change it")
        return Area(mmap.mmap(descriptor, AREA_BYTES, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
    except OSError as error:
        raise WireError(f"its memory cannot be used: {error}") from None


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
