"""Clients that go away, readers and senders that are slow, and servers that end: nobody else notices."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import uvicorn
from openai import APIError, InternalServerError
from runtime.pair import PROMPT, on_pass, reference
from serving.running import MODEL, SECONDS, TEXT, Running, events, plain_engine, serving
from table_model import TableTokenizer
from typing_extensions import Self

from amusd.types import Mode

LONG = 300
ANSWER = TableTokenizer(50).decode(reference(LONG)[len(PROMPT) :])


class Paused:
    """Passes that begin one by one, as the test says."""

    def __init__(self, server: Running) -> None:
        self.at_work: list[int] = []
        """How many answers each pass was of."""
        self._steps = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)
        self._server = server
        self.is_over = False
        on_pass(server.engine, self._wait)

    def _wait(self, _number: int) -> None:
        if self.is_over:
            return
        self.at_work.append(self._server.num_at_work)
        self._arrived.release()
        assert self._steps.acquire(timeout=SECONDS)

    def arrived(self) -> None:
        """Wait until a pass is about to be computed."""
        assert self._arrived.acquire(timeout=SECONDS)

    def go_on(self) -> None:
        self._steps.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """No pass waits any more."""
        self.is_over = True
        self._steps.release(1000)


def raw_request(server: Any, body: dict[str, Any], length: int | None = None) -> socket.socket:
    """A request by hand, of which `length` bytes of the body are sent."""
    host, port = server.url.removeprefix("http://").split(":")
    own = socket.create_connection((host, int(port)), timeout=SECONDS)
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    own.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content[:length])
    return own


def until(holds: Callable[[], bool], seconds: float = SECONDS) -> None:
    async def wait() -> None:
        while not holds():  # noqa: ASYNC110 - it happens in other threads
            await asyncio.sleep(0.002)

    asyncio.run(asyncio.wait_for(wait(), seconds))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_row_before_another_pass(stream: bool) -> None:
    with serving(plain_engine(), mode=Mode.AUTOREGRESSIVE) as server, Paused(server) as passes:
        own = raw_request(server, server.chat(max_tokens=LONG, stream=stream))
        for _ in range(3):
            passes.arrived()
            passes.go_on()
        passes.arrived()  # a pass is being computed
        if stream:
            received = b""
            while b"chat.completion.chunk" not in received:
                received += own.recv(1000)
        own.close()
        until(lambda: server.gate.service.num_in_flight == 0)
        num_before = len(passes.at_work)
        passes.go_on()
        until(lambda: server.num_at_work == 0)
        assert len(passes.at_work) == num_before
        assert passes.at_work == [1] * num_before
        passes.end()
        assert server.figures()["amusd:requests_aborted_total{}"] == 1
        assert events(server.post("/v1/chat/completions", server.chat(max_tokens=5, stream=True)))


def test_all_choices_of_a_client_that_goes_away_end() -> None:
    with serving(plain_engine(), mode=Mode.AUTOREGRESSIVE, max_queue=2) as server, Paused(server) as passes:
        own = raw_request(server, server.chat(max_tokens=LONG, n=6, stream=True))
        passes.arrived()
        assert server.gate.service.num_in_flight == 6
        own.close()
        until(lambda: server.gate.service.num_in_flight == 0)
        passes.end()
        until(lambda: server.num_at_work == 0)
        with server.client() as client:
            answer = client.completions.create(model=MODEL, prompt=TEXT, max_tokens=9, temperature=0)
        assert answer.choices[0].text == ANSWER[:9]


def test_a_client_that_sends_no_more_and_one_that_reads_nothing_hold_up_nobody() -> None:
    with serving(plain_engine(max_num_seqs=2), mode=Mode.AUTOREGRESSIVE, max_queue=0) as server:
        slow = [raw_request(server, server.chat(max_tokens=5), length=10) for _ in range(5)]
        deaf = [raw_request(server, server.chat(max_tokens=LONG, stream=True)) for _ in range(2)]
        until(lambda: server.figures().get("vllm:e2e_request_latency_seconds_count{}", 0) == 2)  # all is computed
        text = server.post("/v1/chat/completions", server.chat(max_tokens=9)).json()["choices"][0]["message"]["content"]
        assert text == ANSWER[:9]
        for own in (*slow, *deaf):
            own.close()


def test_a_server_that_ends_lets_running_answers_end_and_takes_no_new_one() -> None:
    lines: list[str] = []
    found: list[str] = []
    engine = plain_engine(max_num_seqs=1, pass_seconds=0.001)
    with serving(engine, mode=Mode.AUTOREGRESSIVE) as server, Paused(server) as passes:
        lines = server.lines

        def read(stream: bool) -> None:
            with server.client() as client:
                answer: Any = client.completions.create(
                    model=MODEL, prompt=TEXT, max_tokens=50, temperature=0, stream=stream
                )
                found.append("".join(one.choices[0].text for one in (answer if stream else [answer])))

        readers = [threading.Thread(target=read, args=(stream,)) for stream in (True, False)]
        for reader in readers:
            reader.start()
        passes.arrived()
        until(lambda: server.gate.service.num_in_flight == 2)  # one of them waits for the other
        server.gate.service.is_closing = True
        with server.client() as client, pytest.raises(InternalServerError) as refused:
            client.completions.create(model=MODEL, prompt=TEXT)
        assert (refused.value.status_code, refused.value.code) == (503, "shutting_down")
        assert refused.value.response.headers["retry-after"]
        health = server.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "shutting down")
        passes.end()
    for reader in readers:
        reader.join(SECONDS)
    assert found == [ANSWER[:50]] * 2
    assert all("cut off" not in line for line in lines)


def test_an_answer_that_takes_too_long_is_cut_off_in_words() -> None:
    errors: list[APIError] = []
    with serving(plain_engine(pass_seconds=0.01), mode=Mode.AUTOREGRESSIVE, shutdown_seconds=0.0) as server:
        begun = threading.Barrier(3, timeout=SECONDS)

        def read(stream: bool) -> None:
            fields = {"model": MODEL, "prompt": TEXT, "max_tokens": 390, "temperature": 0, "stream": stream}
            with server.client() as client:
                try:
                    if not stream:
                        begun.wait()
                    answer: Any = client.completions.create(**fields)  # type: ignore[call-overload]
                    for number, _ in enumerate(answer):
                        if number == 1:
                            begun.wait()
                except APIError as error:
                    errors.append(error)

        readers = [threading.Thread(target=read, args=(stream,)) for stream in (True, False)]
        for reader in readers:
            reader.start()
        begun.wait()
        until(lambda: server.gate.num_inside == 2)
    for reader in readers:
        reader.join(SECONDS)
    assert [error.code for error in errors] == ["shutting_down"] * 2
    assert any("2 requests were cut off" in line for line in server.lines)


def test_headers_that_come_byte_by_byte_end_their_connection_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uvicorn.Config", functools.partial(uvicorn.Config, timeout_keep_alive=0.3))
    with serving(plain_engine(), mode=Mode.AUTOREGRESSIVE) as server:
        body = server.chat(max_tokens=3)
        slow_body = raw_request(server, body, length=20)
        slow_headers = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=0.01)
        slow_headers.sendall(b"GET / HTTP/1.1\r\nA: ")

        def has_ended() -> bool:
            with suppress(TimeoutError):
                slow_headers.sendall(b"a")
                return slow_headers.recv(1) == b""
            return False

        with suppress(ConnectionError):  # it was closed between the two
            until(has_ended)
        slow_headers.close()
        slow_body.sendall(json.dumps(body).encode()[20:])
        assert slow_body.recv(100).startswith(b"HTTP/1.1 200 OK")
        slow_body.close()
