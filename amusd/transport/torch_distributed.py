"""A link over `torch.distributed`: gloo, or gloo with long messages from GPU to GPU over NCCL.

* Gloo has no polling receive, and a send ends only when the peer receives. So two threads do both; `send` and `receive`
  see bounded queues, and never wait for the peer.
* A closing peer says goodbye; a dying process ends its connections. Between machines a missing heartbeat means a loss
  after `REMOTE_PATIENCE`; on one machine a stopped process is slow, not lost.
* The store (`process_groups.py`) and gloo's listeners are neither encrypted nor authenticated.
* `close` leaves no thread behind, unless groups are forming: that ends within `FORM_SECONDS`, or later if the peer is
  killed amid it.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from datetime import timedelta

from amusd.errors import ConfigError, PeerLostError, WireError
from amusd.protocol.messages import Message
from amusd.transport.addresses import LOOPBACK, Endpoint, parse_endpoint
from amusd.transport.base import MAX_QUEUED_MESSAGES, FrameCodec
from amusd.transport.frame_queue import FrameQueue
from amusd.transport.lanes import Lane
from amusd.transport.process_groups import Backend, Meeting, check_backend

CLOSE_SECONDS = 2.0
"""How long `close` waits for the last messages to leave."""
HEARTBEAT_SECONDS = 1.0
"""Between machines: heartbeats of a silent sender."""
REMOTE_PATIENCE = timedelta(seconds=5)
LOCAL_PATIENCE = timedelta(days=365)
"""On one machine the kernel tells when a process ends."""

_MEET_SECONDS = 0.01  # how often the listening end looks whether the peer has come
_JOIN_SECONDS = 1.0  # how long a thread may take to end once its waits were
_CLOSED = "this end of the link is closed"
_CLOSED_BY_PEER = "the peer closed the link"

logger = logging.getLogger(__name__)


class TorchDistributedTransport:
    """A `Transport` to another process. Make it with `bind` or `connect`, neither of which waits."""

    def __init__(self, endpoint: Endpoint, nonce: int, *, backend: Backend, device: str | None, hosts: bool) -> None:
        """Raises OSError when this end serves the store and cannot listen."""
        self.frames = FrameCodec(nonce)
        self._nonce = nonce
        self._device = device if backend == "nccl" else None
        self._outbox = FrameQueue()
        self._inbox = FrameQueue()
        self._meeting: Meeting | None = None
        if hosts:
            self._meeting = Meeting.host(endpoint, nonce)
            endpoint = self._meeting.endpoint
        self._endpoint = endpoint
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        self.address = f"{backend}://{host}:{endpoint.port}"
        self._is_closing = threading.Event()
        self._lanes: tuple[Lane, Lane] | None = None
        self._carrier = threading.Thread(target=self._carry, name=f"{backend}-send", daemon=True)
        self._reader = threading.Thread(target=self._read, name=f"{backend}-receive", daemon=True)
        self._carrier.start()

    @classmethod
    def bind(
        cls,
        address: str | None,
        nonce: int,
        *,
        backend: Backend = "gloo",
        devices: tuple[str, str] = ("cpu", "cpu"),
        insecure: bool = False,
    ) -> TorchDistributedTransport:
        """The listening end: `tcp://HOST:PORT`, None for a free port on loopback.

        `devices`: of both ends, for NCCL. Raises ConfigError when the backend does not work here, or the address is
        taken, malformed, or beyond this machine.
        """
        check_backend(backend, devices, same_machine=address is None)
        endpoint = _endpoint(address or LOOPBACK, backend, insecure=insecure, to_bind=True)
        try:
            return cls(endpoint, nonce, backend=backend, device=devices[0], hosts=True)
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"transport.address={address or LOOPBACK}: cannot listen there: {reason}") from None

    @classmethod
    def connect(
        cls,
        address: str,
        nonce: int,
        *,
        devices: tuple[str, str] = ("cpu", "cpu"),
        insecure: bool = False,
    ) -> TorchDistributedTransport:
        """The other end, for the listening end's `address`, which names the backend. Raises ConfigError."""
        scheme, _, rest = address.partition("://")
        backend: Backend = "nccl" if scheme == "nccl" else "gloo"
        endpoint = _endpoint(f"tcp://{rest}", backend, insecure=insecure, to_bind=False)
        check_backend(backend, devices, same_machine=endpoint.is_local)
        return cls(endpoint, nonce, backend=backend, device=devices[1], hosts=False)

    def send(self, message: Message) -> None:
        """Queue a message. Raises PeerLostError."""
        self._put(self.frames.encode(message))

    def has_room(self, num_bytes: int) -> bool:
        """See `Transport`."""
        return self._outbox.has_room(num_bytes)

    def receive(self, timeout: float) -> Message | None:
        """The next message, or None after `timeout` seconds. Raises PeerLostError."""
        deadline = time.monotonic() + timeout
        return self.frames.next_message(lambda: next(iter(self._inbox.take(deadline - time.monotonic())), None))

    def close(self) -> None:
        """Release everything, soon after `CLOSE_SECONDS`. Idempotent; never raises."""
        if self._is_closing.is_set():
            return
        self._outbox.end(_CLOSED)
        self._is_closing.set()
        self._inbox.end(_CLOSED, discard=True)
        self._carrier.join(CLOSE_SECONDS)
        self._outbox.end(_CLOSED, discard=True)
        for lane in self._lanes or ():
            lane.interrupt()
        threads = (self._carrier, self._reader)
        for thread in threads:
            if thread.is_alive():
                thread.join(_JOIN_SECONDS)
        if not any(thread.is_alive() for thread in threads):
            self._lanes = self._meeting = None

    def _put(self, frame: bytes) -> None:
        if (reason := self._outbox.ending or self._inbox.ending) is not None:
            raise PeerLostError(reason)
        if not self._outbox.put(frame, 0.0):
            reason = "no peer has come" if self._lanes is None else "the peer stopped reading"
            raise PeerLostError(self._outbox.ending or f"{reason}: {len(self._outbox)} messages wait for it")

    def _carry(self) -> None:
        """First thread: meet the peer, then send the outbox."""
        try:
            lanes = self._meet()
            if lanes is None:
                return
            self._lanes = lanes
            self._reader.start()
            self._send_all(lanes[0])
        except (OSError, RuntimeError) as error:
            logger.debug("lost the peer: %s", error)
            self._outbox.end(_CLOSED_BY_PEER, discard=True)
            if self._reader.ident is None:  # else it first hands over what the peer sent
                self._inbox.end(_CLOSED_BY_PEER)
        finally:
            if self._is_closing.is_set() and self._lanes is not None:
                self._lanes[1].interrupt()  # also where `close` waits for these threads no more

    def _meet(self) -> tuple[Lane, Lane] | None:
        """Both lanes once the peer has come; None if this end closes first."""
        if self._meeting is None:
            self._meeting = Meeting.join(self._endpoint, self._nonce)
        while not self._meeting.is_complete:
            if self._is_closing.is_set() and not self._outbox:
                return None
            time.sleep(_MEET_SECONDS)
        return self._meeting.form_lanes(LOCAL_PATIENCE if self._endpoint.is_local else REMOTE_PATIENCE, self._device)

    def _send_all(self, lane: Lane) -> None:
        silence = LOCAL_PATIENCE.total_seconds() if self._endpoint.is_local else HEARTBEAT_SECONDS
        with suppress(PeerLostError):  # the outbox has ended, and is empty
            while True:
                lane.send(self._outbox.take(silence, MAX_QUEUED_MESSAGES))
        if self._is_closing.is_set():
            lane.send_goodbye()

    def _read(self) -> None:
        """Second thread: fill the inbox until the peer is lost or this end is closed."""
        assert self._lanes is not None
        reason = _CLOSED_BY_PEER
        try:
            while (frames := self._lanes[1].receive()) is not None:
                if not all(map(self._inbox.put, frames)):
                    return
        except WireError as error:
            reason = str(error)
            logger.warning("lost the peer: %s", reason)
            for lane in self._lanes:
                lane.interrupt()  # so that the peer learns of it
        except RuntimeError as error:
            logger.debug("lost the peer: %s", error)
        self._inbox.end(reason)
        self._outbox.end(reason, discard=True)


def _endpoint(address: str, backend: Backend, *, insecure: bool, to_bind: bool) -> Endpoint:
    endpoint = parse_endpoint(address, beyond=insecure, to_bind=to_bind)
    if endpoint.host in ("", "*", "0.0.0.0", "::"):  # noqa: S104  # refused
        raise ConfigError(
            f"transport.address={address}: transport={backend} needs tcp://HOST:PORT with the address of one interface"
        )
    return endpoint
