"""The connections of clients: how many there may be, how long each is waited for, and when its client has left."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from amusd.serving.requests import RequestError
from amusd.serving.responses import encoded

CLIENT_SECONDS = 30.0
"""How long a client may take to send a request whole, or to read before more can be written."""
PROBE_SECONDS = 0.25
MOST = 1024
SPARE_DESCRIPTORS = 24
"""Kept for the next draft, and for connections that are being refused."""


@dataclass
class Room:
    """How many connections there may be. A full room is told once, until it is half empty."""

    tell: Callable[[str], None]
    most: int
    _is_told: bool = False

    @classmethod
    def of(cls, tell: Callable[[str], None], wanted: int) -> Room:
        """At most `MOST` or `wanted`, and fewer than this process may have descriptors beside those that it has."""
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        left = allowed - len([*Path("/dev/fd").iterdir()]) - SPARE_DESCRIPTORS
        most = max(MOST, wanted)
        return cls(tell, most if allowed == resource.RLIM_INFINITY else max(1, min(most, left)))

    def is_exceeded(self, number: int) -> bool:
        """Whether there is no room for the last of `number` connections."""
        if number > self.most:
            self.say_full(
                f"{self.most} connections are open, as many as {MOST} and ulimit -n allow; others are refused"
            )
        elif number <= self.most // 2:
            self._is_told = False
        return number > self.most

    def say_full(self, line: str) -> None:
        """Tell the operator, once."""
        if not self._is_told:
            self._is_told = True
            self.tell(line)

    def failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Tell in a line that there are no descriptors to accept a connection; as asyncio tells all else."""
        if isinstance(context.get("exception"), OSError) and "accept" in context["message"]:
            self.say_full(f"no connection can be accepted: {context['exception'].strerror}")
        else:
            loop.default_exception_handler(context)


class Connection(H11Protocol):
    """A connection that is closed when its client lets it wait for `CLIENT_SECONDS`.

    A client that has closed its writing half is answered. Whether it has left altogether shows when it is written to.
    """

    def __init__(self, room: Room, **options: Any) -> None:
        super().__init__(**options)
        self._room = room
        self._timer: asyncio.TimerHandle | None = None
        self._is_half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Refuse the connection if there is no room."""
        super().connection_made(transport)
        if self._room.is_exceeded(len(self.connections)):
            self._refuse(RequestError("too many connections; try again later", status=503))
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the clock."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def handle_events(self) -> None:
        """Start or end the clock when something has come, or the next request's turn has."""
        super().handle_events()
        self._watch()

    def pause_writing(self) -> None:
        """Start the clock of a client that does not read."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """End it."""
        super().resume_writing()
        self._watch()

    def eof_received(self) -> bool:  # type: ignore[override]  # False closes the connection
        """Keep the connection while a request is answered; but HTTP/1.0 has nothing to probe it with."""
        is_answered = self.conn.their_state is h11.DONE and not self.cycle.response_complete
        self._is_half_closed = is_answered and self.scope["http_version"] != "1.0"
        if self._is_half_closed:
            self.loop.call_later(PROBE_SECONDS, self._probe)
        return self._is_half_closed

    def _probe(self) -> None:
        """Write what means nothing: it fails the next time if the client has left."""
        if self.transport.is_closing():
            return
        if not self.flow.write_paused and not self.cycle.response_complete:
            is_stream = self.cycle.response_started
            event = h11.Data(b":\n\n") if is_stream else h11.InformationalResponse(status_code=100, headers=[])
            self.transport.write(self.conn.send(event))
        self.loop.call_later(PROBE_SECONDS, self._probe)

    def _watch(self) -> None:
        is_awaited = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if self._is_half_closed and is_awaited:
            self.transport.close()
        if not (is_awaited or self.flow.write_paused):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
        elif self._timer is None:
            self._timer = self.loop.call_later(CLIENT_SECONDS, self._late)

    def _late(self) -> None:
        cycle: Any = self.cycle  # or None
        if cycle is None or not cycle.response_started:
            self._refuse(RequestError(f"the request did not come within {CLIENT_SECONDS:g} s", status=408))
        else:
            self.transport.abort()

    def _refuse(self, error: RequestError) -> None:
        body = encoded(error.body)
        head = f"HTTP/1.1 {error.status} \r\nContent-Type: application/json\r\nConnection: close\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()
