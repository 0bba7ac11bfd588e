"""The connections of clients: how many there may be, how long each is waited for, and when its client has left."""

from __future__ import annotations

import resource
from asyncio import Transport
from pathlib import Path
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from amusd.logs import warn_once
from amusd.serving.requests import RequestError
from amusd.serving.responses import encoded

CLIENT_SECONDS = 30.0
"""How long a client may take to send the head or the body of a request, or to read anything of an answer."""
LOOK_SECONDS = 0.25
MOST = 1024
SPARE_DESCRIPTORS = 24
"""Kept for the next draft, and for connections that are being refused."""


def most_connections(wanted: int) -> int:
    """Return `MOST` or `wanted`, but less than this process may have descriptors beside those that it has."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(max(MOST, wanted), allowed - len([*Path("/dev/fd").iterdir()]) - SPARE_DESCRIPTORS))


class Connection(H11Protocol):
    """A connection that is closed when its client lets it wait for `CLIENT_SECONDS`.

    A client that has closed its writing half is answered. Whether it has left altogether shows when it is written to.
    """

    def __init__(self, most: int, **options: Any) -> None:
        """`most`: of connections at a time."""
        super().__init__(**options)
        self._most = most
        self._is_half_closed = False
        self._awaited: tuple[object, int] | None = None
        self._awaited_since = 0.0

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Refuse the connection if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._most:
            warn_once(f"{self._most} connections are open, all that ulimit -n and {MOST} allow; others are refused")
            self._refuse(RequestError("too many connections; try again later", status=503))
        self._look()

    def eof_received(self) -> bool:  # type: ignore[override]  # False closes the connection
        """Keep the connection while a request is answered; but HTTP/1.0 has nothing to probe it with."""
        is_answered = self.conn.their_state is h11.DONE and not self.cycle.response_complete
        self._is_half_closed = is_answered and self.scope["http_version"] != "1.0"
        return self._is_half_closed

    def _look(self) -> None:
        """Look at times whether the client has left, or lets the server wait."""
        if self not in self.connections:  # it has ended
            return
        self.loop.call_later(LOOK_SECONDS, self._look)
        is_sending = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        num_unread, now = self.transport.get_write_buffer_size(), self.loop.time()
        awaited = (self.cycle, num_unread)
        if awaited != self._awaited or not (is_sending or num_unread):
            self._awaited, self._awaited_since = awaited, now
        if now - self._awaited_since >= CLIENT_SECONDS:
            self._cut_off()
        elif self._is_half_closed and is_sending:
            self.transport.close()
        elif self._is_half_closed and not (num_unread or self.cycle.response_complete):
            # what means nothing: it fails the next time if the client has left
            probe = h11.InformationalResponse(status_code=100, headers=[])
            self.transport.write(self.conn.send(h11.Data(b":\n\n") if self.cycle.response_started else probe))

    def _cut_off(self) -> None:
        cycle: Any = self.cycle  # or None
        if self.transport.is_closing() or (cycle is not None and cycle.response_started):
            self.transport.abort()
        else:
            self._refuse(RequestError(f"the request did not come within {CLIENT_SECONDS:g} s", status=408))

    def _refuse(self, error: RequestError) -> None:
        body = encoded(error.body)
        head = f"HTTP/1.1 {error.status} \r\nContent-Type: application/json\r\nConnection: close\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()
