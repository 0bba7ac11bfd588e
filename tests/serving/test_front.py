"""The front of many engines over engines that are lists of messages: what its client gets when some are lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is not installed: pip install 'amusd[serve]'")

from amusd.serving import front
from amusd.serving.front import ENGINES, TAKEN, EngineLostError, Front, conversation_of, unavailable
from amusd.serving.requests import RequestError
from amusd.serving.responses import DONE

LOST = EngineLostError("killed")
JSON_START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
STREAM_START = {**JSON_START, "headers": [(b"content-type", b"text/event-stream; charset=utf-8")]}
WAIT = "wait"
"""In the place of a message: nothing more comes."""


def taken(engine: str) -> dict[str, Any]:
    return {"type": TAKEN, "engine": engine}


def part(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


class Engines:
    """Each request is answered by the next script."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts = list(scripts)
        self.asked: list[tuple[bytes, str]] = []
        self.num_left = 0
        """Requests that were cancelled or read to their end."""

    async def ask(self, scope: Any, body: bytes, conversation: str) -> AsyncGenerator[Any, None]:
        self.asked.append((body, conversation))
        try:
            for message in self.scripts.pop(0):
                if isinstance(message, Exception):
                    raise message
                if message == WAIT:
                    await asyncio.Event().wait()
                yield message
        finally:
            self.num_left += 1


class Client:
    """Sends one request; with `leaves` it goes away behind it."""

    def __init__(self, body: bytes = b"{}", *, path: str = "/v1/completions", leaves: bool = False) -> None:
        self.scope = {"type": "http", "method": "POST", "path": path, "headers": []}
        self.received: list[Any] = []
        self._incoming = [part(body[at : at + 4], more=at + 4 < len(body)) for at in range(0, len(body), 4)]
        self._leaves = leaves

    async def receive(self) -> dict[str, Any]:
        if self._incoming:
            return {**self._incoming.pop(0), "type": "http.request"}
        if not self._leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.received.append(message)

    @property
    def status(self) -> int:
        return int(self.received[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.received[0]["headers"])

    @property
    def body(self) -> bytes:
        assert self.received[-1].get("more_body", False) is False
        return b"".join(message["body"] for message in self.received[1:])

    @property
    def code(self) -> str:
        return str(json.loads(self.body)["error"]["code"])


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "_LOOK_SECONDS", 0.0)


def answer(engines: Engines, client: Client, *, wait_seconds: float = 60.0) -> Client:
    application = Front(engines.ask, max_body_bytes=100, wait_seconds=wait_seconds)
    asyncio.run(asyncio.wait_for(application(client.scope, client.receive, client.send), 60))
    assert engines.num_left == len(engines.asked)  # no engine works for a client that has all it will get
    return client


def test_an_answer_is_passed_on_with_the_name_of_its_engine() -> None:
    engines = Engines([taken("a"), JSON_START, part(b"42", more=False)])
    client = answer(engines, Client(b'{"prompt": "six times seven"}'))
    assert (client.status, client.body) == (200, b"42")
    assert (client.headers[b"x-amusd-engine"], client.headers[b"x-amusd-lost"]) == (b"a", b"0")
    assert engines.asked[0][0] == b'{"prompt": "six times seven"}'


@pytest.mark.parametrize(
    "before",
    [
        [LOST],  # before an engine had it
        [taken("a"), LOST],
        [taken("a"), JSON_START, LOST],
        [taken("a"), JSON_START, part(b"4"), LOST],
        [taken("a"), STREAM_START, part(b"opening"), LOST],
    ],
    ids=["chosen", "taken", "started", "half", "opened"],
)
def test_an_engine_that_is_lost_before_the_answer_has_begun_is_not_seen(before: list[Any]) -> None:
    engines = Engines(before, [taken("b"), STREAM_START, part(b"x"), part(b"y"), part(b"", more=False)])
    client = answer(engines, Client())
    assert (client.status, client.body) == (200, b"xy")
    assert client.headers[b"x-amusd-engine"] == b"b"
    assert client.headers[b"x-amusd-lost"] == (b"0" if before == [LOST] else b"1")


def test_a_stream_that_has_begun_ends_with_an_error_where_its_engine_is_lost() -> None:
    engines = Engines([taken("a"), STREAM_START, part(b"opening,"), part(b"token,"), LOST])
    client = answer(engines, Client())
    begun, _, rest = client.body.partition(b"data: ")
    assert begun == b"opening,token,"
    error, done = rest.split(b"\n\n", 1)
    assert json.loads(error)["error"]["code"] == "engine_lost"
    assert done == DONE


def test_an_engine_that_is_lost_behind_the_whole_answer_changes_nothing() -> None:
    engines = Engines([taken("a"), STREAM_START, part(b"x"), part(b"y"), part(b"", more=False), LOST])
    assert answer(engines, Client()).body == b"xy"


def test_a_request_that_ends_every_engine_is_refused_before_it_ends_all() -> None:
    engines = Engines(*[[taken("a"), LOST]] * (ENGINES + 1))
    client = answer(engines, Client())
    assert (client.status, client.code, client.headers[b"retry-after"]) == (503, "engine_lost", b"1")
    assert len(engines.scripts) == 1


@pytest.mark.parametrize("script", [[WAIT], [LOST]], ids=["none", "all-lost"])
def test_a_request_that_no_engine_takes_is_refused_in_time(script: list[Any]) -> None:
    client = answer(Engines(*[script] * 100_000), Client(), wait_seconds=0.05)
    assert (client.status, client.code) == (503, "no_engine")


def test_what_refuses_a_request_is_told_the_client() -> None:
    client = answer(Engines([unavailable("the queue is full", "queue_full", status=429)]), Client())
    assert (client.status, client.code) == (429, "queue_full")
    assert isinstance(unavailable("", ""), RequestError)


def test_a_client_that_goes_away_ends_its_answer() -> None:
    engines = Engines([taken("a"), STREAM_START, WAIT])
    client = answer(engines, Client(leaves=True))
    assert client.received == []


def test_no_more_of_a_body_is_kept_than_shows_that_it_is_too_large() -> None:
    engines = Engines([taken("a"), {**JSON_START, "status": 413}, part(b"too large", more=False)])
    assert answer(engines, Client(b"x" * 1000)).status == 413
    assert 100 < len(engines.asked[0][0]) <= 104


@pytest.mark.parametrize("path", ["/", "/metrics", "/timeline"])
def test_what_is_one_engines_own_has_no_route(path: str) -> None:
    assert answer(Engines(), Client(path=path)).status == 404


def named(fields: Any, *headers: tuple[bytes, bytes]) -> str:
    return conversation_of(headers, json.dumps(fields).encode())


def test_the_turns_of_a_conversation_have_one_name_and_others_have_others() -> None:
    system, first, reply, second = (
        {"role": role, "content": role + number}
        for role, number in (("system", ""), ("user", "1"), ("assistant", ""), ("user", "2"))
    )
    chat = named({"messages": [system, first]})
    assert chat == named({"messages": [system, first, reply, second], "temperature": 0.5})
    assert len({chat, named({"messages": [system, second]}), named({"messages": [first]}), ""}) == 4
    story = "x" * front.OPENING_LENGTH
    assert named({"prompt": story + "a"}) == named({"prompt": story + "b"}) != named({"prompt": "a"})
    assert named({"prompt": [1, 2]}) != named({"prompt": [1, 3]})


def test_the_client_may_name_its_conversation() -> None:
    assert named({"prompt": "a", "prompt_cache_key": "k"}) == named({"prompt": "b", "prompt_cache_key": "k"})
    header = (b"X-Session-Id", b"me")
    assert named({"prompt": "a"}, header) == named({"prompt": "b"}, header) != named({"prompt": "a"})


@pytest.mark.parametrize("body", [b"", b"\xff", b"[" * 100_000, b"[]", b"{}", b'{"messages": 3}', b'{"prompt": null}'])
def test_what_is_part_of_no_conversation_has_no_name(body: bytes) -> None:
    assert conversation_of((), body) == ""


@pytest.mark.parametrize("messages", [[], [3], [{"role": "system"}], [{"content": {"a": []}}]])
def test_a_chat_that_the_engine_will_refuse_has_a_name_all_the_same(messages: list[Any]) -> None:
    assert named({"messages": messages}) != ""
