"""A load on one OpenAI endpoint: requests by a schedule or by users in turn, and the times of their chunks.

Knows the OpenAI protocol and no server: the same code loads amusd, vLLM and SGLang. `httpx` is imported where needed.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amusd.errors import ConfigError

if TYPE_CHECKING:
    import httpx

Body = dict[str, Any]
"""The JSON of a request."""
PATHS = {True: "/v1/chat/completions", False: "/v1/completions"}
"""Paths of a chat and of a completion."""
SHOWN_CHARACTERS = 200
"""Longest piece of a server's error message that is kept."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where to ask."""

    url: str
    """Base without `/v1`."""
    model: str
    api_key: str | None = None
    is_chat: bool = True
    timeout_seconds: float = 600.0
    """Longest silence within one request."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Either `users`, each of whom asks again when answered, or arrivals by a Poisson process with `rate` a second."""

    users: int | None = None
    rate: float | None = None
    seed: int = 0
    """Draws the arrivals."""

    def __str__(self) -> str:
        return f"{self.users} users" if self.users is not None else f"{self.rate:g} requests/s"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one request saw. Times are seconds since the load began."""

    index: int
    """Which of the bodies it sent."""
    due: float
    """When it had to be sent; latency counts from here, so that a late client hides nothing."""
    sent: float
    chunks: Sequence[float]
    """When each chunk with text came."""
    end: float
    num_tokens: int
    """By the server's `usage`; where it sends none, the number of chunks."""
    usage: Mapping[str, Any] | None
    digest: str
    """Hash of the text: equal answers have equal ones."""
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Time to first token: seconds until the first chunk with text."""
        return self.chunks[0] - self.due if self.chunks else None

    @property
    def latency(self) -> float:
        """Seconds until the last chunk with text."""
        return (self.chunks[-1] if self.chunks else self.end) - self.due

    @property
    def tpot(self) -> float | None:
        """Time per output token: seconds from first to last chunk, divided by the tokens after the first.

        None where there are fewer than two of either: an answer in one piece says nothing about its pace.
        """
        if min(len(self.chunks), self.num_tokens) < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.num_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks with text: inter-token latency as vLLM counts it, a chunk of several tokens once."""
        return [later - earlier for earlier, later in itertools.pairwise(self.chunks)]


def poisson_arrivals(rate: float, number: int, seed: int) -> list[float]:
    """Seconds at which requests arrive, the first at 0; gaps are exponential with mean `1 / rate`."""
    draws = random.Random(seed)  # noqa: S311 - a schedule, not a secret
    return list(itertools.accumulate((draws.expovariate(rate) for _ in range(number - 1)), initial=0.0))


async def first_model(url: str, api_key: str | None) -> str:
    """The first model that the endpoint lists. Raises `ConfigError`."""
    import httpx

    try:
        async with httpx.AsyncClient(base_url=url, headers=_headers(api_key)) as client:
            response = await client.get("/v1/models")
            response.raise_for_status()
            return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{url}/v1/models names no model ({type(error).__name__}: {error}); use --model") from error


async def measure(endpoint: Endpoint, load: Load, bodies: Sequence[Body]) -> tuple[list[Sample], float]:
    """Send all bodies; return a sample for each, in their order, and the seconds from the first to the last end."""
    import httpx

    async with httpx.AsyncClient(
        base_url=endpoint.url,
        headers=_headers(endpoint.api_key),
        timeout=endpoint.timeout_seconds,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    ) as client:
        begin = time.perf_counter()

        def now() -> float:
            return time.perf_counter() - begin

        async def send(index: int, due: float) -> Sample:
            return await _ask(client, PATHS[endpoint.is_chat], bodies[index], index, due, now)

        if load.users is not None:
            samples = await _closed_loop(load.users, len(bodies), now, send)
        elif load.rate is not None:
            samples = await _open_loop(poisson_arrivals(load.rate, len(bodies), load.seed), now, send)
        else:
            raise ValueError("a load has users or a rate")
    return samples, max((sample.end for sample in samples), default=0.0)


async def _closed_loop(
    users: int, number: int, now: Callable[[], float], send: Callable[[int, float], Awaitable[Sample]]
) -> list[Sample]:
    """Every user takes the next body as soon as the answer before is complete."""
    left = iter(range(number))

    async def user() -> list[Sample]:
        return [await send(index, now()) for index in left]

    by_user = await asyncio.gather(*(user() for _ in range(users)))
    return sorted(itertools.chain(*by_user), key=lambda sample: sample.index)


async def _open_loop(
    arrivals: Sequence[float], now: Callable[[], float], send: Callable[[int, float], Awaitable[Sample]]
) -> list[Sample]:
    """Every request is sent when it is due, however many are unanswered."""

    async def one(index: int, due: float) -> Sample:
        await asyncio.sleep(due - now())
        return await send(index, due)

    return await asyncio.gather(*(one(index, due) for index, due in enumerate(arrivals)))


async def _ask(
    client: httpx.AsyncClient, path: str, body: Body, index: int, due: float, now: Callable[[], float]
) -> Sample:
    """Send one streamed request and read it to its end; what goes wrong is the sample's `error`."""
    import httpx

    sent, error = now(), None
    answer = _Answer()
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code == httpx.codes.OK:
                async for data in data_fields(response.aiter_bytes()):
                    answer.read(data, now())
                error = answer.error or (None if answer.is_done else "the stream ended without [DONE]")
            else:
                await response.aread()
                error = f"{response.status_code}: {response.text[:SHOWN_CHARACTERS]}"
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return Sample(
        index=index,
        due=due,
        sent=sent,
        chunks=answer.chunks,
        end=now(),
        num_tokens=len(answer.chunks) if answer.num_tokens is None else answer.num_tokens,
        usage=answer.usage,
        digest=hashlib.sha256("".join(answer.texts).encode()).hexdigest()[:16],
        error=error,
    )


class _Answer:
    """What the chunks of one stream have said so far."""

    def __init__(self) -> None:
        self.chunks: list[float] = []
        self.texts: list[str] = []
        self.usage: Mapping[str, Any] | None = None
        self.num_tokens: int | None = None
        self.error: str | None = None
        self.is_done = False

    def read(self, data: bytes, seconds: float) -> None:
        """Take the `data` of one event that came at `seconds`. Raises as JSON and dicts do where it is no chunk."""
        if data == b"[DONE]":
            self.is_done = True
            return
        chunk = json.loads(data)
        if chunk.get("error"):
            self.error = f"in the stream: {json.dumps(chunk['error'])[:SHOWN_CHARACTERS]}"
        if chunk.get("usage"):
            self.usage = chunk["usage"]
            self.num_tokens = int(chunk["usage"]["completion_tokens"])
        text = ""
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            text += choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
        if text:
            self.chunks.append(seconds)
            self.texts.append(text)


async def data_fields(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The `data` of each server-sent event, however the stream is cut into pieces.

    Lines are cut as bytes: as text they would also be cut at U+2028, which an answer may hold.
    """
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()
    if rest.startswith(b"data:"):
        yield rest.removeprefix(b"data:").strip()


def _headers(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
