"""A link between two processes of one machine: a ring of shared memory in each direction, and a socket to wake up by.

Messages travel through the memory alone (`ring.py`); the socket tells that the peer has come, wakes a receiver that
sleeps, and ends when the peer's process does, however it ends. What this decides:

* A message is in the peer's reach when `send` returns. A process killed right after loses nothing that it sent, and
  `close` has nothing to wait for; a peer that never came gets nothing.
* The ring holds `RING_BYTES`; a message that finds no room means that the peer stopped reading.
* A waiting receiver looks at the memory again and again for a while (`base.spin`); then it announces that it sleeps,
  and the next message wakes it.
* An announcement and a message may cross, because the processor may show a store later than the load behind it: the
  first sleep is bounded by `FIRST_SLEEP_SECONDS`, after which the announcement has long been seen.
* A poll looks at the memory, and at the socket only every `LOOK_SECONDS`: that much later it knows of a lost peer. A
  receive with time to wait knows at once. A stopped process is slow, not lost.
* The listening end's socket file is gone once the peer has come (`meeting.py`), and the memory has no name. Only an end
  that is killed while it waits for its peer leaves something behind: a private folder with an empty socket file.
"""

from __future__ import annotations

import math
import select
import socket
import time
from contextlib import suppress

from amusd.errors import ConfigError, PeerLostError, PeerProtocolError, WireError
from amusd.protocol.messages import Message
from amusd.transport.base import FrameCodec, spin
from amusd.transport.meeting import Door, introduce, knock, read_introduction
from amusd.transport.ring import RING_BYTES, Area, Rings

FIRST_SLEEP_SECONDS = 0.001
"""Longest delay of a message that crosses the announcement of a sleep."""
LOOK_SECONDS = 0.001
"""How often polls and sends look whether the peer is there."""

_LONGEST_POLL_SECONDS = 3600.0  # poll takes milliseconds in 32 bits
_CLOSED_BY_PEER = "the peer closed the link"


class SharedMemoryTransport:
    """One end of a link to another process. A `Transport`; make it with `bind` or `connect`, neither of which waits."""

    def __init__(self, nonce: int, address: str, *, door: Door | None, connection: socket.socket | None) -> None:
        self.address = address
        """Address that this end listens at or is connected to."""
        self.frames = FrameCodec(nonce)
        self._nonce = nonce
        self._door = door
        self._connection = connection
        self._poller = select.poll()
        self._rings = Rings(Area.create())
        self._woken = 0  # the sleep of the peer that it has been woken from
        self._next_look = 0.0
        self._loss: str | None = None
        self._is_closed = False

    @classmethod
    def bind(cls, nonce: int) -> SharedMemoryTransport:
        """The listening end, in a folder of its own. Raises ConfigError where the platform cannot do this."""
        try:
            door = Door(nonce)
        except (AttributeError, OSError) as error:
            raise ConfigError(f"transport=shared_memory: no socket files here, use transport=zeromq: {error}") from None
        try:
            return cls(nonce, door.address, door=door, connection=None)
        except ConfigError:
            door.close()
            raise

    @classmethod
    def connect(cls, address: str, nonce: int) -> SharedMemoryTransport:
        """The other end. Raises ConfigError when there is no listener at `address` on this machine."""
        connection = knock(address)
        try:
            transport = cls(nonce, address, door=None, connection=connection)
        except ConfigError:
            connection.close()
            raise
        with suppress(OSError):  # it has gone, which the first look tells
            introduce(connection, nonce, transport._rings.own)
        transport._poller.register(connection, select.POLLIN)
        return transport

    def send(self, message: Message) -> None:
        """Put a message into the ring. Raises PeerLostError."""
        self._put(self.frames.encode(message))

    def has_room(self, num_bytes: int) -> bool:
        """See `Transport`."""
        try:
            return self._rings.has_room(num_bytes)
        except PeerProtocolError:
            return True  # `send` says what is wrong

    def receive(self, timeout: float) -> Message | None:
        """The next message, or None after `timeout` seconds. Raises PeerLostError."""
        deadline = time.monotonic() + timeout
        while (message := self._next_message()) is None:
            now = time.monotonic()
            if now >= self._next_look:
                self._look()
                if self._rings.has_news():  # what the peer sent before it went can be read now
                    continue
                if self._loss is not None:
                    raise PeerLostError(self._loss)
            if now >= deadline:
                return None
            self._wait(deadline)
        return message

    def close(self) -> None:
        """Release everything. Idempotent; never raises; the peer keeps what was sent to it."""
        if self._is_closed:
            return
        if self._door is not None:
            self._admit()  # a peer that stands at the door still gets what was sent
        self._is_closed = True
        self._lose("this end of the link is closed")
        self._forget_peer()
        for resource in (self._door, self._connection, self._rings.own):
            if resource is not None:
                resource.close()

    def _put(self, frame: bytes) -> None:
        if time.monotonic() >= self._next_look:
            self._look()
        if self._loss is not None:
            raise PeerLostError(self._loss)
        try:
            has_room = self._rings.put(frame)
        except PeerProtocolError as error:
            self._break(error)
            raise PeerLostError(str(error)) from None
        if not has_room:
            reason = "no peer has come" if self._rings.theirs is None else "the peer stopped reading"
            raise PeerLostError(f"{reason}: {RING_BYTES >> 20} MiB of messages wait for it")
        self._wake_peer()

    def _wake_peer(self) -> None:
        if self._rings.theirs is None:
            self._look()  # its introduction may have come since: then it may sleep already
        if self._rings.theirs is None or self._connection is None:
            return
        num_sleeps = self._rings.theirs.num_sleeps
        if num_sleeps % 2 == 0 or num_sleeps == self._woken:
            return
        self._woken = num_sleeps
        try:
            self._connection.send(b"\0")
        except BlockingIOError:
            pass  # there are bytes enough to wake it
        except OSError:
            self._lose(_CLOSED_BY_PEER)

    def _next_message(self) -> Message | None:
        """The next good message that is here."""
        try:
            return self.frames.next_message(self._rings.take)
        except PeerProtocolError as error:
            self._break(error)
            return None

    def _wait(self, deadline: float) -> None:
        """Wait until something may have changed, or `deadline`."""
        if self._door is not None:
            self._door.wait(_milliseconds(deadline - time.monotonic()))
        elif self._rings.theirs is None:
            self._poller.poll(_milliseconds(deadline - time.monotonic()))
        elif not spin(self._rings.has_news, deadline):
            self._sleep(deadline)

    def _sleep(self, deadline: float) -> None:
        self._rings.own.note_sleep()
        longest = FIRST_SLEEP_SECONDS
        while not self._rings.has_news() and (remaining := deadline - time.monotonic()) > 0:
            if self._poller.poll(_milliseconds(min(remaining, longest))):
                self._next_look = 0.0
                break
            longest = _LONGEST_POLL_SECONDS
        self._rings.own.note_sleep()

    def _look(self) -> None:
        """Find out whether the peer has come, and whether it is still there."""
        if self._loss is not None:
            return
        if self._door is not None:
            self._admit()
        elif self._connection is not None and self._rings.theirs is None:
            try:
                self._rings.theirs = read_introduction(self._connection, self._nonce)
            except (PeerLostError, WireError) as error:
                self._lose(str(error))
        elif self._connection is not None:
            self._next_look = time.monotonic() + LOOK_SECONDS
            if not _is_connected(self._connection):
                self._lose(_CLOSED_BY_PEER)

    def _admit(self) -> None:
        assert self._door is not None
        if (admitted := self._door.admit(self.frames.reject)) is None:
            return
        self._connection, self._rings.theirs = admitted
        with suppress(OSError):  # it has gone again, which the next look tells
            introduce(self._connection, self._nonce, self._rings.own)
        self._door.close()
        self._door = None
        self._poller.register(self._connection, select.POLLIN)

    def _break(self, error: PeerProtocolError) -> None:
        """The peer's memory makes no sense any more, and nothing behind this point can be found in it."""
        self.frames.reject(str(error))
        self._lose(str(error))
        self._forget_peer()

    def _forget_peer(self) -> None:
        """Read nothing more of the peer's memory."""
        if self._rings.theirs is not None:
            self._rings.theirs.close()
            self._rings.theirs = None

    def _lose(self, reason: str) -> None:
        self._loss = reason
        self._next_look = 0.0


def _is_connected(connection: socket.socket) -> bool:
    """True while the other end is there. Reads the wake-up bytes, which have no other meaning, off the socket."""
    try:
        return bool(connection.recv(4096))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _milliseconds(seconds: float) -> int:
    return math.ceil(min(max(seconds, 0.0), _LONGEST_POLL_SECONDS) * 1000)
