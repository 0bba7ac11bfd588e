"""A load of concurrent users on any OpenAI endpoint."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amusd.errors import ConfigError

if TYPE_CHECKING:
    import httpx

Body = dict[str, Any]
"""The JSON of a request."""
SHOWN_CHARACTERS = 200
"""Characters of a server's error message that are kept."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where to ask."""

    url: str
    """Base without `/v1`."""
    model: str
    api_key: str | None = None
    timeout_seconds: float = 600.0
    """Longest silence within one request."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The measurements of one request. Times are seconds since the load began."""

    index: int
    """Index of the body that it sent."""
    sent: float
    chunks: Sequence[float]
    """Arrival times of chunks with text."""
    end: float
    num_tokens: int
    """Number of tokens by the server's `usage`; without one, the number of chunks."""
    has_usage: bool
    digest: str
    """Hash of the text, to compare answers."""
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Time to first token: seconds until the first chunk with text."""
        return self.chunks[0] - self.sent if self.chunks else None

    @property
    def latency(self) -> float:
        """Seconds until the last chunk with text."""
        return (self.chunks[-1] if self.chunks else self.end) - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first chunk; None with fewer than two tokens or chunks."""
        if min(len(self.chunks), self.num_tokens) < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.num_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks with text: inter-token latency as vLLM counts it, a chunk of several tokens once."""
        return [later - earlier for earlier, later in itertools.pairwise(self.chunks)]


async def first_model(url: str, api_key: str | None) -> str:
    """The first model that the endpoint lists. Raises `ConfigError`."""
    import httpx

    try:
        async with httpx.AsyncClient(base_url=url, headers=_headers(api_key)) as client:
            response = await client.get("/v1/models")
            response.raise_for_status()
            return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{url}/v1/models names no model ({type(error).__name__}: {error})") from error


async def measure(endpoint: Endpoint, users: int, bodies: Sequence[Body]) -> tuple[list[Sample], float]:
    """Have users send all bodies, each the next one when answered; return the samples in order, and the seconds."""
    import httpx

    async with httpx.AsyncClient(
        base_url=endpoint.url,
        headers=_headers(endpoint.api_key),
        timeout=endpoint.timeout_seconds,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    ) as client:
        begin = time.perf_counter()
        left = iter(range(len(bodies)))

        async def user() -> list[Sample]:
            return [await _ask(client, bodies[index], index, lambda: time.perf_counter() - begin) for index in left]

        by_user = await asyncio.gather(*(user() for _ in range(users)))
    samples = sorted(itertools.chain(*by_user), key=lambda sample: sample.index)
    return samples, max((sample.end for sample in samples), default=0.0)


async def _ask(client: httpx.AsyncClient, body: Body, index: int, now: Callable[[], float]) -> Sample:
    """Send one streamed request and read it to its end. The sample's `error` says what went wrong."""
    import httpx

    sent, error = now(), None
    answer = _Answer()
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
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
        sent=sent,
        chunks=answer.chunks,
        end=now(),
        num_tokens=len(answer.chunks) if answer.num_tokens is None else answer.num_tokens,
        has_usage=answer.num_tokens is not None,
        digest=hashlib.sha256("".join(answer.texts).encode()).hexdigest()[:16],
        error=error,
    )


class _Answer:
    """The content of the chunks of one stream so far."""

    def __init__(self) -> None:
        self.chunks: list[float] = []
        self.texts: list[str] = []
        self.num_tokens: int | None = None
        self.error: str | None = None
        self.is_done = False

    def read(self, data: bytes, seconds: float) -> None:
        """Take the `data` of one event that came at `seconds`. Raises as JSON and dicts do if it is no chunk."""
        if data == b"[DONE]":
            self.is_done = True
            return
        chunk = json.loads(data)
        if chunk.get("error"):
            self.error = f"in the stream: {json.dumps(chunk['error'])[:SHOWN_CHARACTERS]}"
        if chunk.get("usage"):
            self.num_tokens = int(chunk["usage"]["completion_tokens"])
        text = ""
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            text += delta.get("content") or delta.get("reasoning_content") or ""
        if text:
            self.chunks.append(seconds)
            self.texts.append(text)


async def data_fields(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the `data` of each server-sent event. Lines are cut as bytes: text would also be cut at U+2028."""
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
