"""Clients that leave, slow readers and senders, and servers that end do not disturb other clients."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError
from runtime.pair import on_pass, plain_engine
from serving.running import ANSWER, LONG, MODEL, SECONDS, TEXT, Paused, Running, events, serving, until

from amusd.serving import server as serving_server
from amusd.serving.server import MOST, SPARE_DESCRIPTORS, HttpServer


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_row_before_another_pass(stream: bool) -> None:
    with serving(plain_engine(), mode="autoregressive") as server, closing(Paused(server)) as passes:
        own = server.raw(server.chat(max_tokens=LONG, stream=stream))
        for _ in range(3):
            passes.arrived()
            passes.go_on()
        passes.arrived()  # a pass is being computed
        if stream:
            received = b""
            while b"chat.completion.chunk" not in received:
                received += own.recv(1000)
        own.close()
        until(lambda: server.num_aborted == 1)
        num_before = len(passes.at_work)
        passes.go_on()
        until(lambda: server.num_at_work == 0)
        assert len(passes.at_work) == num_before
        assert passes.at_work == [1] * num_before
        passes.close()
        assert events(server.post("/v1/chat/completions", server.chat(max_tokens=5, stream=True)))


def test_slow_senders_and_slow_readers_hold_up_nobody() -> None:
    """The model's name is in every chunk: so large, a stream is more than the sockets hold."""
    name = "m" * 50_000
    settings = {"max_queue": 0, "model_name": name, "shutdown_seconds": 0.0}
    engine = plain_engine(max_num_seqs=2)
    with serving(engine, mode="autoregressive", **settings) as server, ExitStack() as stack:
        body = server.chat(max_tokens=LONG, stream=True, model=name)
        for _ in range(20):
            stack.enter_context(server.raw(body, length=10))
        readers = [stack.enter_context(server.raw(body, SO_RCVBUF=2048)) for _ in range(2)]
        assert all(reader.recv(1) == b"H" for reader in readers)
        requests = server.service.requests
        until(lambda: all(answer.is_over for request in requests for answer in request.answers))  # all is computed
        short = server.post("/v1/chat/completions", server.chat(max_tokens=9, model=None))
        assert short.json()["choices"][0]["message"]["content"] == ANSWER[:9]
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += readers[0].recv(1 << 20)
        assert "".join(re.findall(r'"content":"(\w+)"', received.decode())) == ANSWER[:LONG]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_ends_its_writing_half_is_answered_until_it_leaves(monkeypatch: Any, stream: bool) -> None:
    monkeypatch.setattr(serving_server, "LOOK_SECONDS", 0.01)
    with serving(plain_engine(), mode="autoregressive") as server:
        with closing(server.raw(server.chat(max_tokens=20, stream=stream))) as own:
            own.shutdown(socket.SHUT_WR)
            received = b"".join(iter(lambda: own.recv(1 << 20), b""))
        *probes, answer = received.decode().split("HTTP/1.1 200 OK\r\n")
        assert not "".join(probes).replace("HTTP/1.1 100 \r\n\r\n", "")
        assert "".join(re.findall(r'"content":"(\w+)"', answer)) == ANSWER[:20]
        own = server.raw(server.chat(max_tokens=LONG, stream=stream))
        with closing(Paused(server)) as passes:
            own.shutdown(socket.SHUT_WR)
            passes.arrived()
            own.close()
            until(lambda: server.num_aborted == 1)
        until(lambda: server.num_at_work == 0)


def test_a_client_that_lets_the_server_wait_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that sends neither head nor body, a part of one, the body of a refused request, or that does not read."""
    monkeypatch.setattr(serving_server, "LOOK_SECONDS", 0.01)
    name = "m" * 50_000
    with serving(plain_engine(), mode="autoregressive", model_name=name) as server, ExitStack() as stack:
        slow = [stack.enter_context(server.raw(server.chat(), length=length)) for length in (0, 10, 40)]
        silent = socket.create_connection(slow[0].getpeername(), SECONDS)
        silent.sendall(b"GET /health HT")
        refused = stack.enter_context(socket.create_connection(slow[0].getpeername(), SECONDS))
        refused.sendall(b"POST /v1/nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n1")
        assert refused.recv(12) == b"HTTP/1.1 404"
        body = server.chat(max_tokens=LONG, stream=True, model=name)
        reader = stack.enter_context(server.raw(body, SO_RCVBUF=2048))
        assert reader.recv(1) == b"H"
        with monkeypatch.context() as impatient:  # from here on, when all of them are there
            impatient.setattr(serving_server, "CLIENT_SECONDS", 0.1)
            for own in (*slow, stack.enter_context(silent)):
                received = b"".join(iter(lambda own=own: own.recv(1 << 20), b""))  # type: ignore[misc]
                assert received.startswith(b"HTTP/1.1 408 ")
                assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
            assert list(iter(lambda: refused.recv(1 << 20), b""))
            until(lambda: not server.service.requests)
        assert server.get("/health").status_code == 200


def test_connections_beyond_the_limit_are_refused_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_server, "MOST", 9)
    with serving(plain_engine(), mode="autoregressive", max_queue=0) as server, ExitStack() as stack:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        clients = [stack.enter_context(socket.create_connection(address, SECONDS)) for _ in range(40)]
        for client in clients[9:]:
            assert client.recv(1000).startswith(b"HTTP/1.1 503 ")
        (line,) = server.lines
        assert "9 connections are open" in line
        stack.close()
        until(lambda: is_well(server))
    assert server.lines == [line]


@pytest.mark.parametrize(
    ("num_free", "wanted", "most"),
    [(10_000, 9, MOST), (10_000, 2_000, 2_000), (100, 2_000, 100 - SPARE_DESCRIPTORS), (0, 9, 1)],
)
def test_no_more_may_connect_than_there_are_descriptors_for(
    monkeypatch: pytest.MonkeyPatch, num_free: int, wanted: int, most: int
) -> None:
    allowed = len([*Path("/dev/fd").iterdir()]) + num_free
    monkeypatch.setattr(resource, "getrlimit", lambda _: (allowed, allowed))
    assert serving_server.most_connections(wanted) == most


def is_well(server: Running) -> bool:
    try:
        return server.get("/health").status_code == 200
    except httpx.TransportError:  # refused before it had said anything
        return False


def read(server: Running, stream: bool, num_tokens: int) -> str:
    fields = {"model": MODEL, "prompt": TEXT, "max_tokens": num_tokens, "temperature": 0, "stream": stream}
    with server.client() as client:
        try:
            answer: Any = client.completions.create(**fields)  # type: ignore[call-overload]
            return "".join(one.choices[0].text for one in (answer if stream else [answer]))
        except APIError as error:
            return str(error.code)


def test_a_server_that_ends_lets_running_answers_end_and_takes_no_new_one() -> None:
    engine = plain_engine(max_num_seqs=1)
    with ThreadPoolExecutor(2) as threads, serving(engine, mode="autoregressive") as server:
        with closing(Paused(server)) as passes:
            answers = [threads.submit(read, server, stream, 50) for stream in (True, False)]
            passes.arrived()
            until(lambda: server.service.num_in_flight == 2)  # one of them waits for the other
            server.service.is_closing = True
            refused = server.post("/v1/chat/completions", server.chat())
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            assert refused.headers["retry-after"]
            health = server.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "shutting down")
        assert [answer.result(SECONDS) for answer in answers] == [ANSWER[:50]] * 2
    assert all("cut off" not in line for line in server.lines)


def test_a_hangup_that_nohup_ignores_does_not_end_the_server() -> None:
    async def handlers() -> list[Any]:
        with HttpServer.__new__(HttpServer).capture_signals():
            return [signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)]

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        hangup, end = asyncio.run(handlers())
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert hangup is signal.SIG_IGN
    assert end is not signal.getsignal(signal.SIGTERM)


def test_an_answer_that_takes_too_long_is_cut_off_in_words() -> None:
    engine = plain_engine()
    with ThreadPoolExecutor(2) as threads:
        with serving(engine, mode="autoregressive", shutdown_seconds=0.0) as server:
            asynchronous = server.service.engine
            on_pass(engine, lambda _: until(lambda: engine.scheduler.num_waiting or asynchronous._is_closing))
            answers = [threads.submit(read, server, stream, 390) for stream in (True, False)]
            half_sent = server.raw(server.chat(), length=10)
            until(lambda: len(server.service.requests) == 2)
            until(lambda: server.num_at_work == 2)
        assert [answer.result(SECONDS) for answer in answers] == ["shutting_down"] * 2
    assert any("2 requests were cut off" in line for line in server.lines)
    half_sent.close()
