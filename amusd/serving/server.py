"""The server: the socket, uvicorn, and the signals that end it."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import PurePath

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from amusd.async_engine import AsyncEngine
from amusd.config import EngineConfig, RunConfig
from amusd.engine import Engine
from amusd.errors import ConfigError
from amusd.schedule import SYNTHETIC
from amusd.serving.app import Gate, make_app
from amusd.serving.service import Service

_BACKLOG = 64
"""Connections accepted at once; three times as many can be on their way before one too many is closed."""
_OTHER_DESCRIPTORS, _MIN_CONNECTIONS = 4 * _BACKLOG, 16
_LOOK_SECONDS = 0.02
_END_SECONDS = 1.0


def run_server(config: RunConfig, connect: Callable[[EngineConfig], Engine], tell: Callable[[str], None]) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP; for the main thread. A second signal has its default effect.

    `connect` makes the engine in its own thread. `tell` gets lines for the operator. Raises `ConfigError` for an
    unavailable address, before anything is loaded, and what `connect` raises.
    """
    if SYNTHETIC in [drafter.kind for drafter in config.engine_for("serve").drafters]:
        raise ConfigError("drafter=synthetic: has to be told answers that a server does not know; choose another one")
    with closing(listener(config.serve.host, config.serve.port)) as own:
        asyncio.run(_serve(config, connect, tell, own))


def listener(host: str, port: int) -> socket.socket:
    """A socket that is bound, and does not listen yet. Raises `ConfigError`."""
    own = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind((host, port))
    except OSError as error:
        own.close()
        raise ConfigError(f"serve.host={host} serve.port={port}: cannot listen there ({error.strerror})") from None
    return own


async def _serve(
    config: RunConfig, connect: Callable[[EngineConfig], Engine], tell: Callable[[str], None], own: socket.socket
) -> None:
    settings = config.engine_for("serve")
    async with AsyncEngine(lambda: connect(settings)) as engine:
        service = make_service(engine, config, settings)
        gate = Gate(make_app(service), service, tell)
        server = HttpServer(gate, lambda: tell(f"serving {service.model} at {url(own)}"))
        with _first_signal() as signalled:
            serving = asyncio.ensure_future(server.serve([own]))
            waiting = asyncio.ensure_future(signalled.wait())
            await asyncio.wait((serving, waiting), return_when=asyncio.FIRST_COMPLETED)
            await drain(service, config.serve.shutdown_seconds, tell)
            server.should_exit = True
            await serving


def make_service(engine: AsyncEngine, config: RunConfig, settings: EngineConfig) -> Service:
    """Return the service over an engine that was made from `settings`."""
    target = settings.target
    name = PurePath(target.model or target.kind)
    model = config.serve.model_name or (name.name if name.is_absolute() else str(name))
    return Service(engine, config.serve, model, config.decoding())


class _Connection(H11Protocol):
    """A client's connection, closed at once where there are too many, and soon where it does not ask for anything."""

    _headers_due: float | None = None
    """When the headers that have begun have to be complete, on the loop's clock."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > _max_connections():
            transport.abort()
        else:  # as between two requests
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def data_received(self, data: bytes) -> None:
        """Take data in. Headers have as long from their first byte to their last as a connection without any."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._headers_due = None
        elif self.timeout_keep_alive_task is None:
            self._headers_due = self._headers_due or self.loop.time() + self.timeout_keep_alive
            self.timeout_keep_alive_task = self.loop.call_at(self._headers_due, self.timeout_keep_alive_handler)


def _max_connections() -> int:
    """How many clients there are descriptors for; asyncio's `accept` never recovers without any."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(_MIN_CONNECTIONS, soft - _OTHER_DESCRIPTORS) if soft != resource.RLIM_INFINITY else sys.maxsize


class HttpServer(uvicorn.Server):
    """Uvicorn without its own signals and lines."""

    def __init__(self, gate: Gate, tell_started: Callable[[], None]) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # `Gate` tells what went wrong
        super().__init__(
            uvicorn.Config(
                gate,
                access_log=False,
                backlog=_BACKLOG,
                http=_Connection,
                lifespan="off",
                log_config=None,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=1,  # for what is no answer: pages that watch
                ws="none",
            )
        )
        self._tell_started = tell_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self._tell_started()

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Leave signals alone."""
        return nullcontext()


async def drain(service: Service, seconds: float, tell: Callable[[str], None]) -> None:
    """Refuse new requests, and wait for those at work; end them after so many seconds."""
    service.is_closing = True
    if service.requests:
        tell(f"ending: no new requests; {len(service.requests)} are being answered, for {seconds:g} s at most")
    await _until_idle(service, seconds)
    if service.requests:
        tell(f"serve.shutdown_seconds={seconds:g}: {len(service.requests)} requests were cut off")
        await service.engine.aclose()
        await _until_idle(service, _END_SECONDS)  # they tell their clients


async def _until_idle(service: Service, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while service.requests and time.monotonic() < deadline:  # noqa: ASYNC110 - an event would be more code
        await asyncio.sleep(_LOOK_SECONDS)


@contextmanager
def _first_signal() -> Iterator[asyncio.Event]:
    """An event that the first signal sets; from then on signals are answered as they were before."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def restore() -> None:
        event.set()
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)

    for number in before:  # not by `signal`: asyncio's own way also takes the wakeup descriptor from who had it
        loop.add_signal_handler(number, restore)
    try:
        yield event
    finally:
        restore()


def url(own: socket.socket) -> str:
    """The address at which a browser on this machine finds the server."""
    host, port = own.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"http://{host}:{port}"
