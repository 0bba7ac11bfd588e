"""The server under clients that are many, slow or rude: nothing leaks, and nobody waits for them. Counts, no times."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

pytest.importorskip("httpx", reason="httpx is not installed: pip install httpx")
pytest.importorskip("uvicorn", reason="the server is not installed: pip install 'amusd[serve]'")

import httpx

from tests.serving.table_server import ROWS, TableServer, table_server

WAIT_SECONDS = 120.0
"""The longest anything here may take on a busy machine."""
BODY = {"model": "embedded", "prompt": "abc", "temperature": 0}
LONG = {**BODY, "max_tokens": 390}


@pytest.fixture(scope="module")
def server() -> Iterator[TableServer]:
    with table_server() as running:
        yield running


def complete(server: TableServer, **fields: Any) -> str:
    response = httpx.post(f"{server.url}/v1/completions", json={**BODY, **fields}, timeout=WAIT_SECONDS)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def raw_connection(server: TableServer, head: str, body: bytes, **socket_options: int) -> socket.socket:
    """A connection that has sent a request's head and this much of its body."""
    connection = socket.socket()
    for name, value in socket_options.items():
        connection.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    host, port = server.url.removeprefix("http://").split(":")
    connection.connect((host, int(port)))
    connection.sendall(f"{head}\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode() + body)
    return connection


def posted(server: TableServer, body: dict[str, Any], **socket_options: int) -> socket.socket:
    """A connection that has sent a whole request, and has read nothing."""
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(content)}"
    return raw_connection(server, head, b"\r\n" + content, **socket_options)


def until(holds: Any) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_idle(server: TableServer) -> bool:
    health = server.health()
    return bool(health["num_requests_running"] == health["num_requests_waiting"] == 0)


def test_slow_senders_stop_nobody(server: TableServer) -> None:
    """A hundred clients promise a body and send a byte of it now and then; others are answered meanwhile."""
    head = "POST /v1/completions HTTP/1.1\r\nContent-Length: 1000"
    before = server.num_descriptors
    senders = [raw_connection(server, head, b"\r\n{") for _ in range(100)]
    try:
        for _ in range(5):
            for sender in senders:
                sender.sendall(b" ")
            assert len(complete(server, max_tokens=20)) == 20
        assert server.health()["num_requests_waiting"] == 0  # they take no place in the queue
    finally:
        for sender in senders:
            sender.close()
    until(lambda: server.num_descriptors <= before + 1)
    assert is_idle(server)


def test_slow_readers_stop_nobody_and_their_answers_end() -> None:
    """More clients than rows ask for long streams and read a byte at a time; rows become free all the same.

    The model's name is in every chunk: so large, a stream is more than the sockets hold.
    """
    name = "m" * 50_000
    with table_server(model_name=name) as server:
        expected = complete(server, model=name, max_tokens=390)
        before = server.num_descriptors
        readers = [posted(server, {**LONG, "model": name, "stream": True}, SO_RCVBUF=2048) for _ in range(3 * ROWS)]
        assert all(reader.recv(1) == b"H" for reader in readers)
        for _ in range(5):
            assert len(complete(server, model=name, max_tokens=20)) == 20
            assert all(reader.recv(1) for reader in readers)
        until(lambda: is_idle(server))  # all of them are computed, and nobody waits for their readers
        first = readers.pop()
        received = b"H"
        while not received.endswith(b"0\r\n\r\n"):
            received += first.recv(1 << 20)
        assert b"data: [DONE]" in received
        assert "".join(re.findall(r'"text":"(\w*)"', received.decode())) == expected
        for reader in (first, *readers):
            reader.close()
        until(lambda: server.num_descriptors <= before + 1)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 8))])
def test_clients_that_leave_at_random_points_leave_nothing_behind(server: TableServer, seed: int) -> None:
    """At any byte of the request or of the answer, by a reset or by a close; with and without a stream."""
    before = server.num_descriptors
    draws = random.Random(seed)
    expected = complete(server, max_tokens=30)
    for _ in range(60):
        body = {**LONG, "stream": draws.random() < 0.7, "n": draws.choice((1, 1, 3))}
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(content)}"
        num_sent = draws.choice((0, draws.randrange(len(content)), len(content), len(content), len(content)))
        connection = raw_connection(server, head, b"\r\n" + content[:num_sent])
        connection.settimeout(0.2)
        with suppress(TimeoutError):
            for _ in range(draws.choice((0, 0, 1, 5))):
                connection.recv(draws.choice((1, 100, 5000)))
        if draws.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
        connection.close()
    until(lambda: is_idle(server))
    until(lambda: server.num_descriptors <= before + 1)
    assert complete(server, max_tokens=30) == expected
    assert server.health()["code"] == 200


def test_more_connections_than_descriptors_end_no_server() -> None:
    """Clients beyond what the process has descriptors for are turned away; when all have left, it answers as before."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (320, before[1]))
        try:
            server = stack.enter_context(table_server())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        own = server.num_descriptors
        connections = []
        with suppress(OSError):  # it may close one before all is sent
            while len(connections) < 400:
                connections.append(raw_connection(server, "GET /version HTTP/1.1", b""))
        assert len(connections) > 64
        until(lambda: server.num_descriptors <= own + 64)
        for connection in connections:
            connection.close()
        until(lambda: server.num_descriptors <= own + 1)
        assert len(complete(server, max_tokens=20)) == 20
        assert server.end() == (0, "")


def test_two_requests_in_one_packet_are_both_answered(server: TableServer) -> None:
    content = json.dumps({**BODY, "max_tokens": 3}).encode()
    request = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(content)}\r\nHost: localhost\r\n".encode()
    request += b"Content-Type: application/json\r\n\r\n" + content
    connection = raw_connection(server, "GET /version HTTP/1.1", b"\r\n" + 2 * request)
    received = b""
    while received.count(b"HTTP/1.1 200 OK") < 3 or received.count(b'"finish_reason"') < 2:
        received += connection.recv(65536)
    connection.close()


@pytest.mark.parametrize("is_streamed", [True, pytest.param(False, marks=pytest.mark.long)])
def test_sigterm_ends_beside_slow_senders_and_idle_connections(is_streamed: bool) -> None:
    """Half a request keeps the server up no longer than `shutdown_seconds`; running answers are complete."""
    with table_server(shutdown_seconds=6.0) as server:
        others = [raw_connection(server, "POST /v1/completions HTTP/1.1\r\nContent-Length: 9", b"\r\n{")]
        others += [raw_connection(server, "GET /version HTTP/1.1", b"\r\n")]
        expected = complete(server, max_tokens=200)
        answers: list[Any] = []

        def ask() -> None:
            body = {**BODY, "max_tokens": 200, "stream": is_streamed}
            answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_SECONDS))

        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: server.health()["num_requests_running"] or answers)
        code, _said = server.end()
        asking.join(WAIT_SECONDS)
        assert code == 0
        (answer,) = answers
        if is_streamed:
            assert answer.text.endswith("data: [DONE]\n\n")
            pieces = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            assert "".join(choice["text"] for piece in pieces for choice in piece["choices"]) == expected
        else:
            assert answer.json()["choices"][0]["text"] == expected
        for other in others:
            other.close()


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_two_thousand_requests_leave_the_process_as_it_was() -> None:
    """Memory, descriptors, threads and rows after 500 requests and after 2,500, of which a tenth goes away early."""
    with table_server() as server:
        threads = (
            server.num_threads + min(32, (os.cpu_count() or 1) + 4) + 2
        )  # asyncio's own, and what torch starts late
        asyncio.run(_load(server, range(500)))
        memory, descriptors = server.megabytes, server.num_descriptors
        asyncio.run(_load(server, range(500, 2500)))
        until(lambda: is_idle(server))
        figures = (
            f"{memory:.0f} MB, {descriptors} descriptors; {server.num_threads} threads; then {server.megabytes:.0f} MB"
        )
        sys.stdout.write(f"{figures}\n")
        assert server.num_descriptors <= descriptors + 1, figures
        assert server.num_threads <= threads, figures
        assert server.megabytes < memory + 8, figures  # a leak of 4 kB a request would be 8 MB
        code, said = server.end()
        assert (code, said) == (0, "")


async def _load(server: TableServer, seeds: range) -> None:
    left = iter(seeds)

    async def user(client: Any) -> None:
        for seed in left:
            draws = random.Random(seed)
            body = {
                **BODY,
                "prompt": "".join(draws.choices("abcdefghij", k=draws.randint(1, 60))),
                "max_tokens": draws.randint(1, 60),
                "stream": draws.random() < 0.5,
                "temperature": draws.choice((0, 0.7)),
                "mode": draws.choice(("autoregressive", "synchronous", "asynchronous")),
                "seed": seed,
            }
            leaves = draws.random() < 0.1
            async with client.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200, await response.aread()
                if not leaves:
                    async for _ in response.aiter_bytes():
                        pass

    async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_SECONDS) as client:
        await asyncio.gather(*(user(client) for _ in range(8)))
