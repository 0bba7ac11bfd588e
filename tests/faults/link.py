"""Two one-way channels of real frames, and an end of theirs for each process that listens or connects.

The other end receives all frames that are on their way, also those of an earlier incarnation, which it can tell only by
their fields.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Callable

from faults.weather import ECHO_OF_INCARNATION, TO_DRAFT, TO_TARGET, Weather
from faults.world import Side, World

from amusd.errors import PeerLostError
from amusd.protocol.messages import DraftHello, Message, TargetHello
from amusd.transport.base import Transport

MAX_COPY_MS = 50
NUM_ECHOED = 12
MAX_ECHO_MS = 150
"""Longest time in ms for which frames of one incarnation arrive after the next one has begun."""
HANG_UP_MS = (2, 30, 200)
"""Longest times in ms until a side knows that the other is gone."""
LATENCY_NS = 1_000


class Channel:
    """One direction. Frames keep their order, unless one is reordered."""

    def __init__(self, world: World, weather: Weather, direction: str) -> None:
        self._end: End | None = None
        self._waiting: list[bytes] = []
        self._over: set[int] = set()
        self._world = world
        self._weather = weather
        self._direction = direction
        self._last_ns = 0
        self._before: deque[bytes] = deque(maxlen=NUM_ECHOED)

    @property
    def end(self) -> End | None:
        return self._end

    def lead_to(self, end: End | None) -> None:
        self._end = end
        if end is not None:
            waiting, self._waiting = self._waiting, []
            for frame in waiting:
                end.arrived(frame)
            if end.nonce in self._over:
                end.peer_gone()
            for frame in self._before:
                if self._weather.hits(ECHO_OF_INCARNATION):
                    self._arrive_within(MAX_ECHO_MS, frame)

    def send(self, frame: bytes) -> None:
        self._world.note(f"{self._direction} {zlib.crc32(frame[:-4]):08x} {len(frame)}")
        if not self._weather.blocks(self._direction, lambda: self._travel(frame)):
            self._travel(frame)

    def hang_up(self, nonce: int) -> None:
        """Tell the peer that no further frame is sent; this may arrive before or after frames that are on their way."""
        self._world.plan(self._world.between(0.5, self._world.random.choice(HANG_UP_MS)), lambda: self._hung_up(nonce))

    def _hung_up(self, nonce: int) -> None:
        self._over.add(nonce)
        if self._end is not None and self._end.nonce == nonce:
            self._end.peer_gone()

    def _travel(self, frame: bytes) -> None:
        weather, world = self._weather, self._world
        if weather.hits("duplicate"):
            self._arrive_within(MAX_COPY_MS, frame)
        if self._before and weather.hits("echo"):
            self._arrive_within(MAX_COPY_MS, world.random.choice(self._before))
        self._before.append(frame)
        if not weather.hits("lose"):
            arriving = weather.damaged(frame)
            due_ns = world.between(0.1, 2) + weather.detour_ns("delay")
            sent_ns = world.now_ns + world.acting.ahead_ns
            due_ns = max(sent_ns + due_ns, self._last_ns)
            self._last_ns = due_ns
            world.plan(due_ns - sent_ns + weather.detour_ns("reorder"), lambda: self._arrive(arriving))

    def _arrive_within(self, max_ms: float, frame: bytes) -> None:
        self._world.plan(self._world.between(0, max_ms), lambda: self._arrive(frame))

    def _arrive(self, frame: bytes) -> None:
        if self._end is None:
            self._waiting.append(frame)
        else:
            self._end.arrived(frame)


class End(Transport):
    def __init__(
        self, side: Side, incoming: Channel, outgoing: Channel, nonce: int, passes: Callable[[int], bool]
    ) -> None:
        super().__init__("memory://", nonce)
        self.nonce = nonce
        self.clock = side
        self._incoming = incoming
        self._outgoing = outgoing
        self._passes = passes
        self._inbox: deque[bytes] = deque()
        self._closed = False
        self._peer_gone = False
        self.on_arrival: Callable[[], None] = lambda: None
        incoming.lead_to(self)

    @property
    def has_mail(self) -> bool:
        return bool(self._inbox) or self._peer_gone

    def arrived(self, frame: bytes) -> None:
        self._inbox.append(frame)
        self.on_arrival()

    def peer_gone(self) -> None:
        self._peer_gone = True
        self.on_arrival()

    def send_frame(self, frame: bytes) -> None:
        self._check_open()
        if self._peer_gone:
            raise PeerLostError("the peer is gone")
        self._outgoing.send(frame)

    def receive_frame(self, timeout: float) -> bytes | None:
        raise NotImplementedError

    def receive(self, timeout: float) -> Message | None:
        deadline_ns = self.clock.ns + int(timeout * 1e9) + (LATENCY_NS if timeout > 0 else 0)
        while True:
            self._check_open()
            while self._inbox:
                message = self.accept(self._inbox.popleft())
                if message is not None:
                    return message
            if self._peer_gone:
                raise PeerLostError("the peer is gone")
            if not self._passes(deadline_ns):
                return None

    def close(self) -> None:
        """Close this end, as the system does when a process ends; the peer learns of it sooner or later."""
        if self._closed:
            return
        self._closed = True
        self._inbox.clear()
        if self._incoming.end is self:
            self._incoming.lead_to(None)
        self._outgoing.hang_up(self.nonce)

    def _check_open(self) -> None:
        if self._closed:
            raise PeerLostError("this end of the link is closed")


class AnySession(End):
    """Takes the frames of every session once its own has begun, so that only incarnations tell them apart."""

    begun = False

    def accept(self, frame: bytes) -> Message | None:
        if self.begun and len(frame) >= 14:
            self._nonce = struct.unpack_from("<Q", frame, 6)[0]
        message = super().accept(frame)
        self._nonce = self.nonce
        self.begun |= isinstance(message, (TargetHello, DraftHello))
        return message


class Wires:
    def __init__(self, world: World, weather: Weather, *, any_session: bool) -> None:
        self.to_target = Channel(world, weather, TO_TARGET)
        self.to_draft = Channel(world, weather, TO_DRAFT)
        self._world = world
        self._end = AnySession if any_session else End

    def target_end(self, nonce: int, passes: Callable[[int], bool]) -> End:
        return self._end(self._world.target, self.to_target, self.to_draft, nonce, passes)

    def draft_end(self, nonce: int, passes: Callable[[int], bool]) -> End:
        return self._end(self._world.draft, self.to_draft, self.to_target, nonce, passes)
