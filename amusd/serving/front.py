"""The front of many engines: which of them a request goes to, and what its client gets if that engine is lost.

An ASGI application that knows neither models nor Ray: `Ask` has a request answered (`launch/ray_serve.py`). An answer
has begun with the first event behind the opening of a stream, or when it is whole. Until then nothing of it is sent to
the client, so a lost engine costs only time: the request is sent again. Later, the stream ends with an error.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any

import anyio
from starlette.types import Message, Receive, Scope, Send

from amusd.serving.app import OPEN, error_response
from amusd.serving.requests import RequestError
from amusd.serving.responses import DONE, event
from amusd.serving.service import RETRY_SECONDS, unless_gone

ENGINES = 3
"""Engines that may be lost while they have a request, before it is refused: it may be what ends them."""
OPENING_LENGTH = 512
"""Characters or tokens at the start of a prompt that tell a completion's conversation."""
_SESSION_HEADER = b"x-session-id"
_LOOK_SECONDS = 0.1
"""Wait before a request is sent again."""

Ask = Callable[[Scope, bytes, str], AsyncGenerator[Message, None]]
"""Has a request (scope, body, conversation) answered by one engine.

First comes `{"type": TAKEN, "engine": its name}`, then the ASGI messages of the response. Raises `EngineLostError`, and
`RequestError` where no engine can take the request.
"""
TAKEN = "amusd.taken"


class EngineLostError(Exception):
    """The engine that had a request, or was to get it, is gone."""


class Front:
    """The ASGI application."""

    def __init__(self, ask: Ask, *, max_body_bytes: int, wait_seconds: float) -> None:
        """`wait_seconds`: how long a request waits at most until an engine has taken it."""
        self._ask = ask
        self._max_body_bytes = max_body_bytes
        self._wait_seconds = wait_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"unexpected ASGI scope: {scope['type']}")
        try:
            path = scope["path"]
            if not path.startswith("/v1/") and path not in {*OPEN, "/openapi.json"} - {"/"}:
                raise RequestError(f"unknown route: {scope['method']} {path[:200]}", status=404)
            body = await self._body(receive)
            if body is not None:
                await unless_gone(receive, self._answer(scope, body, send))
        except RequestError as error:
            await error_response(error)(scope, receive, send)

    async def _body(self, receive: Receive) -> bytes | None:
        """The body, or as much of it as shows an engine that it is too large; None where the client goes away."""
        body, is_whole = bytearray(), False
        while not is_whole and len(body) <= self._max_body_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            is_whole = not message.get("more_body", False)
        return bytes(body)

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> bool:
        """Send the answer of the first engine that begins one. Raises `RequestError` where none does."""
        conversation = await asyncio.to_thread(conversation_of, scope["headers"], body)
        deadline = time.monotonic() + self._wait_seconds
        num_lost = 0
        while num_lost < ENGINES:
            response = _Response(send, num_lost)
            try:
                async with aclosing(self._ask(scope, body, conversation)) as messages:
                    response.engine = await self._taken_by(messages, deadline)
                    async for message in messages:
                        await response.take(message)
            except EngineLostError:
                if not response.has_begun:
                    num_lost += response.engine is not None
                    await asyncio.sleep(_LOOK_SECONDS)
                    continue
                await response.cut_off()
            return True
        raise unavailable(f"{ENGINES} engines were lost before they began this answer", "engine_lost")

    async def _taken_by(self, messages: AsyncGenerator[Message, None], deadline: float) -> str:
        """The engine that has taken the request. Raises `RequestError` at the deadline."""
        left = deadline - time.monotonic()
        if left > 0:
            with anyio.move_on_after(left):  # `asyncio.wait_for` may swallow a cancellation
                return str((await anext(messages))["engine"])
        raise unavailable(f"no engine could take the request within {self._wait_seconds:g} s", "no_engine")


class _Response:
    """A response on its way from an engine to the client, withheld until it has begun."""

    def __init__(self, send: Send, num_lost: int) -> None:
        self._send = send
        self._withheld: list[Message] = []
        self._num_lost = num_lost
        self._is_whole = False
        self.has_begun = False
        self.engine: str | None = None
        """The engine that makes it."""

    async def take(self, message: Message) -> None:
        """The next message from the engine."""
        if message["type"] == "http.response.start":
            about = ((b"x-amusd-engine", str(self.engine).encode()), (b"x-amusd-lost", b"%d" % self._num_lost))
            message = {**message, "headers": [*message.get("headers", ()), *about]}
        self._withheld.append(message)
        self._is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)
        if self.has_begun or self._is_whole or (len(self._withheld) > 2 and _is_stream(self._withheld[0])):
            self.has_begun = True
            withheld, self._withheld = self._withheld, []
            for one in withheld:
                await self._send(one)

    async def cut_off(self) -> None:
        """End a stream whose engine is lost; nothing where it is whole."""
        if not self._is_whole:
            error = unavailable("the engine of this answer was lost: it ends here; ask again", "engine_lost")
            await self._send({"type": "http.response.body", "body": event(error.body) + DONE, "more_body": False})


def conversation_of(headers: Iterable[tuple[bytes, bytes]], body: bytes) -> str:
    """A name that all turns of a conversation have in common; empty for a request that is part of none.

    The client's own, in the header `x-session-id` or the field `prompt_cache_key`; else a hash of how it begins: of a
    chat the messages up to the first one of the user, of a completion the first `OPENING_LENGTH` characters or tokens.
    """
    for name, value in headers:
        if name.lower() == _SESSION_HEADER:
            return _hash(value.decode("latin-1"))
    try:
        fields = json.loads(body) if body else None
    except (ValueError, RecursionError):
        return ""  # which the engine refuses
    if not isinstance(fields, dict):
        return ""
    messages, prompt = fields.get("messages"), fields.get("prompt")
    if isinstance(fields.get("prompt_cache_key"), str):
        return _hash(fields["prompt_cache_key"])
    if isinstance(messages, list):
        users = (index for index, one in enumerate(messages) if isinstance(one, dict) and one.get("role") == "user")
        return _hash(messages[: next(users, len(messages)) + 1])
    return _hash(prompt[:OPENING_LENGTH]) if isinstance(prompt, (str, list)) else ""


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _is_stream(start: Message) -> bool:
    return any(value.startswith(b"text/event-stream") for name, value in start["headers"] if name == b"content-type")


def unavailable(message: str, code: str, status: int = 503) -> RequestError:
    """Return the error of a request that may be sent again."""
    return RequestError(message, code=code, status=status, headers={"Retry-After": str(RETRY_SECONDS)})
