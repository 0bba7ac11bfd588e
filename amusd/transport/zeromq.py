"""A link between two processes: a ZeroMQ ROUTER that listens and a DEALER that connects, over a socket file or TCP.

* A peer is lost at its first disconnect, for good. A local link has no heartbeats: a stopped process is slow, not lost.
  A link between machines gives up after 5 s.
* With keys (`curve.py`) bytes are encrypted, and connections without an expected key are refused.
* The first sender of a message is the listening end's peer. Others get `answer_to_others`, and disturb nothing.
  Without keys a stranger may be the first: keep socket files in a private folder.
* A receiver spins before it sleeps (`base.spin_then_sleep`).
* A frame longer than `MAX_FRAME_BYTES` ends the connection before it is read.
"""

from __future__ import annotations

import time
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from amusd.errors import ConfigError, PeerLostError
from amusd.protocol import wire
from amusd.protocol.wire import MAX_FRAME_BYTES
from amusd.transport.addresses import check_address
from amusd.transport.base import (
    CLOSED,
    CLOSED_BY_PEER,
    LOOK_SECONDS,
    MAX_QUEUED_MESSAGES,
    Transport,
    give_way,
    spin_then_sleep,
)
from amusd.transport.curve import Keys, use_keys

CLOSE_SECONDS = 1.0
"""How long `close` waits for the last messages to leave."""

GIVE_WAY_SECONDS = 0.001
"""A sender yields its core after a message, at most this often."""

RECONNECT_MS = 20
"""Pause between two tries to connect."""
_HEARTBEAT_INTERVAL_MS = 1_000
_HEARTBEAT_TIMEOUT_MS = 5_000
_NO_KEY_HELD = (
    "connections failed over their keys and none held; both ends need transport.keys, from one `amusd keys`, or neither"
)
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_WATCHED_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class ZeroMQTransport(Transport):
    """A `Transport` to another process. Neither end waits for the other; the connecting end tries again and again."""

    def __init__(
        self, address: str, nonce: int | None, *, listens: bool, insecure: bool = False, keys: Keys | None = None
    ) -> None:
        """Raises ConfigError for an `address` that is taken, malformed, or remote without `keys` or `insecure`."""
        checked, is_local = check_address(address, beyond=insecure or keys is not None, to_bind=listens)
        super().__init__(checked, nonce)
        self._listens = listens
        self._route = b""  # the peer's name at the listening end, once it has spoken
        self._peer_fds: set[int] = set()  # open connections: the peer's, or all until the peer is known
        self._is_attached = self._is_lost = self._is_closed = False
        self._next_look = self._next_give_way = 0.0  # monotonic seconds
        try:
            self._socket = _new_socket(checked, is_local=is_local, listens=listens)
            # A connection that ends before its handshake points to a wrong key only if there are keys.
            self._refusals = _REFUSALS if keys is not None else _REFUSALS & ~zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            self._monitor = self._socket.get_monitor_socket(_WATCHED_EVENTS | self._refusals)
        except zmq.ZMQError as error:  # there are no descriptors left
            raise ConfigError(f"transport: no link can be made: {error}") from error
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._input = [(self._socket, int(zmq.POLLIN))]
        self._authenticator = None
        try:
            if keys is not None:
                self._authenticator = use_keys(self._socket, keys, listens=listens)
            if listens:
                self._socket.bind(checked)
                self.address = self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
            else:
                self._socket.connect(checked)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"address {address}: cannot be used: {error}") from error

    @property
    def is_lost(self) -> bool:
        """Whether the peer has come and gone. Raises PeerLostError when this end is closed."""
        self._watch_peer()
        return self._is_lost

    def send_frame(self, frame: bytes) -> None:
        """See `Transport`."""
        if time.monotonic() >= self._next_look:
            self._watch_peer()
        if self._listens and not self._route:
            raise PeerLostError("no peer has come")
        if self._is_lost or not self._try_send(frame):
            self._watch_peer()  # the peer may have gone since
            raise PeerLostError(CLOSED_BY_PEER if self._is_lost else "the peer stopped reading")
        if time.monotonic() >= self._next_give_way:
            give_way()  # to libzmq's thread, which may share this core
            self._next_give_way = time.monotonic() + GIVE_WAY_SECONDS

    def receive_frame(self, timeout: float) -> bytes | None:
        """See `Transport`."""
        if self._is_closed:
            raise PeerLostError(CLOSED)
        deadline = time.monotonic() + timeout
        while (frame := self._take()) is None:
            now = time.monotonic()
            if now >= self._next_look:
                self._watch_peer()
                if self._is_lost and not self._has_input():  # all earlier messages have been read
                    raise PeerLostError(CLOSED_BY_PEER)
            if now >= deadline:
                return None
            if not self._is_lost and spin_then_sleep(self._has_input, self._poller.poll, deadline):
                self._next_look = 0.0
        return frame

    def close(self) -> None:
        """See `Link`. Takes at most `CLOSE_SECONDS`."""
        if self._is_closed:
            return
        self._is_closed = True
        self._next_look = 0.0
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0 if self._is_lost else round(CLOSE_SECONDS * 1000))
        if self._authenticator is not None:
            self._authenticator.stop()
        self._socket.context.term()  # returns when the last message has left or lingered long enough

    def drop(self) -> None:
        """See `Link`."""
        self._is_lost = True
        self.close()

    def _try_send(self, frame: bytes) -> bool:
        # libzmq may not have noticed new room; reading the events brings the socket up to date
        return self._send_now(frame) or (_is_ready(self._socket, zmq.POLLOUT) and self._send_now(frame))

    def _send_now(self, frame: bytes) -> bool:
        try:
            if self._listens:
                self._socket.send(self._route, zmq.NOBLOCK | zmq.SNDMORE)
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):  # the queue is full, or the peer is gone
                raise
            return False
        return True

    def _take(self) -> bytes | None:
        if not self._has_input():  # a third of the cost of a `recv` that finds nothing
            return None
        try:
            if not self._listens:
                return self._socket.recv(zmq.NOBLOCK)
            if not self._route:
                return self._take_first()
            route, *_, frame = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:  # only the name of a peer, which has sent no message yet
            return None
        if route == self._route:
            return frame
        self._turn_away(route, frame)
        return None

    def _take_first(self) -> bytes:
        """The first message. Its sender becomes the peer."""
        route, *_, frame = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        self._watch_peer()  # adds the message's connection, unless that has ended
        self._route, self._is_attached = route.bytes, True
        self._peer_fds &= {int(frame.get(zmq.SRCFD))}
        self._is_lost = not self._peer_fds
        return frame.bytes

    def _turn_away(self, route: bytes, frame: bytes) -> None:
        self._watch_peer()
        if self._is_lost:  # the next listening end serves this sender
            return
        self.reject("a second peer")
        if self.answer_to_others is not None:
            with suppress(zmq.ZMQError):  # the sender has gone, or does not read
                answer = wire.encode(self.answer_to_others, wire.nonce_of(frame))
                self._socket.send_multipart([route, answer], zmq.NOBLOCK)

    def _has_input(self) -> bool:
        return bool(zmq.zmq_poll(self._input, 0))

    def _watch_peer(self) -> None:
        """Note connections that came and went, and set the time of the next look."""
        if self._is_closed:
            raise PeerLostError(CLOSED)
        while _is_ready(self._monitor, zmq.POLLIN):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            kind, value = int(event["event"]), int(event["value"])
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                # the event does not say which of the connections it is
                self._is_attached, self.refusal = True, None
            elif kind & self._refusals:
                self.reject("a connection that has shown no key, or a wrong one")
                self.refusal = self.refusal if self._is_attached else f"{self.address}: {_NO_KEY_HELD}"
            elif kind == zmq.EVENT_DISCONNECTED:
                self._peer_fds.discard(value)
                self._is_lost = self._is_lost or (self._is_attached and not self._peer_fds)
            elif not self._route:
                self._peer_fds.add(value)
        if self._is_attached and not self._is_lost:
            self._next_look = time.monotonic() + LOOK_SECONDS


def _new_socket(address: str, *, is_local: bool, listens: bool) -> zmq.Socket[bytes]:
    socket = zmq.Context().socket(zmq.ROUTER if listens else zmq.DEALER)
    if listens:
        socket.set(zmq.ROUTER_MANDATORY, 1)  # otherwise messages without room are dropped
    socket.set_hwm(MAX_QUEUED_MESSAGES)
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.set(zmq.IPV6, int("[" in address))
    socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
    if not is_local:
        socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_INTERVAL_MS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    return socket


def _is_ready(socket: zmq.Socket[bytes], flag: int) -> bool:
    return bool(int(socket.get(zmq.EVENTS)) & flag)
