"""A server in this process, over an engine of table models: real sockets, no signals."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import httpx
from lines import logged
from openai import OpenAI
from runtime.pair import PROMPT, on_pass, reference
from table_model import TableTokenizer

from amusd.async_engine import AsyncEngine
from amusd.config import RunConfig, ServeConfig
from amusd.engine import Engine
from amusd.serving.server import HttpServer, listener, make_service, url
from amusd.serving.service import Service

MODEL = "table"
TEXT = "dbebf"
LONG = 300
ANSWER = TableTokenizer(50).decode(reference(LONG)[len(PROMPT) :])
SECONDS = 120.0


@dataclass
class Running:
    url: str
    service: Service
    engine: Engine
    http: httpx.Client
    lines: list[str] = field(default_factory=list)

    @property
    def num_at_work(self) -> int:
        return len(self.engine.worker.sequences)

    @property
    def num_aborted(self) -> float:
        """Number of aborted requests, counted by the server's thread, which has cancelled the answers by then."""
        return self.figures()["amusd:requests_aborted_total{}"]

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, "timeout": SECONDS, **options})

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def chat(self, **fields: Any) -> dict[str, Any]:
        return {"model": MODEL, "messages": [{"role": "user", "content": TEXT}], "temperature": 0, **fields}

    def raw(self, body: dict[str, Any], length: int | None = None, **options: int) -> socket.socket:
        own = socket.socket()
        for name, value in options.items():
            own.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        own.settimeout(SECONDS)
        own.connect(("127.0.0.1", int(self.url.rpartition(":")[2])))
        content = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        own.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content[:length])
        return own

    def figures(self) -> dict[str, float]:
        found = {}
        for line in self.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                found[name.replace(f'model_name="{MODEL}"', "")] = float(value)
        return found


class Paused:
    """Holds every pass of a server's target until it may go on, or until this is closed."""

    def __init__(self, server: Running) -> None:
        self.at_work: list[int] = []
        self._steps = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)
        self._server = server
        self._is_over = False
        on_pass(server.engine, self._wait)

    def _wait(self, _number: int) -> None:
        if not self._is_over:
            self.at_work.append(self._server.num_at_work)
            self._arrived.release()
            assert self._steps.acquire(timeout=SECONDS)

    def arrived(self) -> None:
        assert self._arrived.acquire(timeout=SECONDS)

    def go_on(self) -> None:
        self._steps.release()

    def close(self) -> None:
        self._is_over = True
        self._steps.release(1000)


def until(holds: Callable[[], object], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def events(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@contextmanager
def serving(engine: Engine, **settings: Any) -> Iterator[Running]:
    """A server in a thread, until the block is left; `settings` are keys of `serve` and of the whole configuration."""
    names = ServeConfig.__dataclass_fields__
    serve = {name: settings.pop(name) for name in tuple(settings) if name in names}
    config = RunConfig(serve=ServeConfig(**{"port": 0, "model_name": MODEL, **serve}), **settings)
    service: list[Service] = []
    own = listener("127.0.0.1", 0)
    thread = threading.Thread(target=lambda: asyncio.run(live()), daemon=True)

    async def live() -> None:
        async with AsyncEngine(lambda: engine) as asynchronous:
            service.append(make_service(asynchronous, config))
            servers.append(HttpServer(service[0]))
            servers[0].capture_signals = nullcontext  # type: ignore[method-assign,assignment]
            await servers[0].serve([own])

    servers: list[HttpServer] = []
    with logged() as lines:
        thread.start()
        until(lambda: lines)
        lines.clear()
        try:
            with httpx.Client(base_url=url(own), timeout=SECONDS) as http:
                yield Running(url(own), service[0], engine, http, lines)
        finally:
            servers[0].should_exit = True
            thread.join(SECONDS)
            assert not thread.is_alive(), "the server did not end"
