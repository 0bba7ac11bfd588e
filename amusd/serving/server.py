"""The server: its socket, uvicorn, the signals that end it, and the connections of clients.

The number of connections is bounded. A client that stalls for `CLIENT_SECONDS` is cut off.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from amusd.async_engine import AsyncEngine
from amusd.config import RunConfig
from amusd.engine import Engine
from amusd.errors import ConfigError
from amusd.logs import logger, warn_once
from amusd.serving.app import is_here, make_app
from amusd.serving.requests import RequestError
from amusd.serving.responses import encoded
from amusd.serving.service import Service

CLIENT_SECONDS = 30.0
"""Longest that a client may take to send the head or the body of a request, or to read any part of an answer."""
LOOK_SECONDS = 0.25
MOST = 1024
"""Most connections at a time, unless the queue of requests needs more."""
SPARE_DESCRIPTORS = 24
"""File descriptors kept free for the next draft, and for refused connections."""
_IDLE_LOOK_SECONDS = 0.02
_END_SECONDS = 1.0
_QUEUE = 1024
"""Connections that wait to be accepted."""


def run_server(config: RunConfig, make_engine: Callable[[], Engine]) -> None:
    """Serve in the main thread until SIGINT, SIGTERM or an unignored SIGHUP. The old handlers get a second signal.

    `make_engine` is called in another thread. Raises `ConfigError` before anything is loaded if the address is
    unavailable, or open to others without a key, and any error of `make_engine`.
    """
    host = config.serve.host
    if config.serve.api_key is None and not is_here(host):
        raise ConfigError(f"serve.host={host}: open to others without a key; set AMUSD_API_KEY or serve.api_key")

    async def serve(own: socket.socket) -> None:
        async with AsyncEngine(make_engine) as engine:
            await HttpServer(make_service(engine, config)).serve([own])

    with closing(listener(host, config.serve.port)) as own:
        asyncio.run(serve(own))


def listener(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises `ConfigError`."""
    own = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind((host, port))
    except OSError as error:
        own.close()
        raise ConfigError(f"serve.host={host} serve.port={port}: cannot listen there ({error.strerror})") from None
    return own


def make_service(engine: AsyncEngine, config: RunConfig) -> Service:
    """Return the service over an engine that was made from `config`."""
    target = config.engine_for("serve").target
    name = PurePath(target.model or target.kind)
    model = config.serve.model_name or (name.name if name.is_absolute() else str(name))
    return Service(engine, config.serve, model, config.decoding())


class HttpServer(uvicorn.Server):
    """Uvicorn without its own log. At the first signal the server lets answers end, then ends."""

    def __init__(self, service: Service) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # the app logs what went wrong
        connection = partial(ClientConnection, most_connections(2 * service.room))
        super().__init__(
            uvicorn.Config(
                make_app(service),
                http=connection,  # type: ignore[arg-type]  # it makes a protocol
                backlog=1,  # a connection takes a descriptor before it is counted
                access_log=False,
                lifespan="off",
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=1,  # only pages that watch the timeline are left
                ws="none",
            )
        )
        self._service = service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and log the address."""
        await super().startup(sockets)
        assert sockets is not None
        sockets[0].listen(_QUEUE)
        logger.info(f"serving {self._service.model} at {url(sockets[0])}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, wait up to `serve.shutdown_seconds` for running ones, and end."""
        service, seconds = self._service, self._service.config.shutdown_seconds
        service.is_closing = True
        if service.requests:
            logger.info(f"ending: no new requests; {len(service.requests)} are answered, for {seconds:g} s at most")
        await _until_idle(service, seconds)
        if service.requests:
            logger.info(f"serve.shutdown_seconds={seconds:g}: {len(service.requests)} requests were cut off")
            await service.engine.aclose()
            await _until_idle(service, _END_SECONDS)  # clients are told meanwhile
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Have the first signal end the server and restore the previous handlers."""
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        if before[signal.SIGHUP] is signal.SIG_IGN:  # by nohup
            del before[signal.SIGHUP]

        def restore() -> None:
            self.should_exit = True
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

        for number in before:  # asyncio also takes the wakeup descriptor from its owner
            loop.add_signal_handler(number, restore)
        try:
            yield
        finally:
            restore()


async def _until_idle(service: Service, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while service.requests and time.monotonic() < deadline:  # noqa: ASYNC110 - an event would be more code
        await asyncio.sleep(_IDLE_LOOK_SECONDS)


def url(own: socket.socket) -> str:
    """The server's URL for a browser on this machine."""
    host, port = own.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"http://{host}:{port}"


def most_connections(wanted: int) -> int:
    """The larger of `MOST` and `wanted`, but no more than the free descriptors of this process."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(max(MOST, wanted), allowed - len([*Path("/dev/fd").iterdir()]) - SPARE_DESCRIPTORS))


class ClientConnection(H11Protocol):
    """A connection that is closed when its client stalls for `CLIENT_SECONDS`.

    A client that has closed its writing half is answered; writing to it shows whether it has left.
    """

    def __init__(self, most: int, **options: Any) -> None:
        """`most`: open connections at a time."""
        super().__init__(**options)
        self._most = most
        self._is_half_closed = False
        self._awaited: tuple[object, int] | None = None
        self._awaited_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Refuse the connection if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._most:
            warn_once(f"{self._most} connections are open, all that ulimit -n and {MOST} allow; others are refused")
            self._refuse(RequestError("too many connections; try again later", status=503))
        self._look()

    def eof_received(self) -> bool:  # type: ignore[override]  # False closes the connection
        """Keep the connection while a request is answered, except for HTTP/1.0, which has no probe."""
        is_answered = self.conn.their_state is h11.DONE and not self.cycle.response_complete
        self._is_half_closed = is_answered and self.scope["http_version"] != "1.0"
        return self._is_half_closed

    def _look(self) -> None:
        """Check from time to time whether the client has left or stalls."""
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
            # a write without meaning: if the client has left, the next write fails
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
