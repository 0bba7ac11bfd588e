"""The life of a request: its place in the queue, its answers, and their end when the client leaves."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from amusd.answer import Answer
from amusd.async_engine import AsyncEngine, read
from amusd.checkpoints.tokenizer import IncrementalDecoder
from amusd.config import DecodingConfig, SamplingParams, ServeConfig
from amusd.errors import AmusdError, ConfigError, StateError
from amusd.logs import logger
from amusd.serving.metrics import ServerMetrics
from amusd.serving.requests import SEED_MASK, Body, RequestError, config_error, sampling_params
from amusd.serving.responses import DONE, Writer, event
from amusd.types import Token

_PLAIN = DecodingConfig(mode="autoregressive")
_ONE_TOKEN = SamplingParams(max_new_tokens=1)
_RETRY = {"Retry-After": "1"}
_LOOK_SECONDS = 0.1


@dataclass(eq=False)
class Service:
    """Answers requests with an engine. For one event loop."""

    engine: AsyncEngine
    config: ServeConfig
    model: str
    decoding: DecodingConfig
    """The schedule of requests that name no mode."""
    is_closing: bool = False
    requests: set[PendingResponse] = field(default_factory=set)
    failed_at: int | None = None
    """The engine's `num_tokens` when an answer last failed."""
    trial: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a health check generates its token."""

    def __post_init__(self) -> None:
        self.max_length = self.engine.engine.worker.model.max_length
        self.room = self.engine.engine.worker.max_num_seqs + self.config.max_queue
        """Most answers that are computed or wait at a time."""
        self.metrics = ServerMetrics(self.model, self.engine.engine)

    @property
    def num_in_flight(self) -> int:
        """Answers that are computed or wait; a complete answer with a slow reader does not count."""
        return sum(request.num_answers - sum(answer.is_over for answer in request.answers) for request in self.requests)

    async def health(self) -> tuple[int, dict[str, Any]]:
        """HTTP status and document; 200: the engine can answer. After a failed answer a trial token decides."""
        engine, state = self.engine.engine, "ok"
        try:
            engine.scheduler.check()
            async with self.trial:
                if self._has_failed and not self.is_closing:
                    await self._try_out()
        except Exception as error:  # noqa: BLE001 - any error means that there are no tokens
            state = f"failing: {type(error).__name__}"
        if self.is_closing:
            state = "shutting down"
        document = {
            "status": state,
            "draft": engine.draft.presence,
            "num_draft_restarts": engine.draft.num_restarts,
            "num_requests_running": len(engine.worker.sequences),
            "num_requests_waiting": engine.scheduler.num_waiting,
        }
        return (200 if state == "ok" else 503), document

    @property
    def _has_failed(self) -> bool:
        """Whether an answer has failed, and the engine has made no token since."""
        return self.failed_at == self.engine.engine.worker.counts.num_tokens

    async def _try_out(self) -> None:
        """Generate one token, unless another answer gets one first. Raises the engine's error."""
        trial = asyncio.ensure_future(self.engine.generate([0, 0], _ONE_TOKEN, decoding=_PLAIN))
        try:
            while self._has_failed and not trial.done():
                await asyncio.wait((trial,), timeout=_LOOK_SECONDS)
            if trial.done():
                trial.result()
        finally:
            trial.cancel()

    def respond(self, body: Body) -> PendingResponse:
        """The response to a request. Raises `RequestError` if there can be none."""
        self.check_model(body.model or self.model)
        if self.is_closing:
            raise closing_error()
        return PendingResponse(self, body, sampling_params(body, self.max_length))

    def check_model(self, name: str) -> None:
        """Raise `RequestError` for the name of another model."""
        if name != self.model:
            message = f"the model '{name[:200]}' does not exist; this server has '{self.model}'"
            raise RequestError(message, "model", "model_not_found", status=404)

    def check_room(self, num_answers: int, param: str) -> None:
        """Raise `RequestError` if the queue has no room for `num_answers`; `param`: the field that asks for answers."""
        if num_answers > self.room:
            raise RequestError(f"{param}: {num_answers} answers are more than this server takes, {self.room}", param)
        if self.num_in_flight + num_answers > self.room:
            raise RequestError("the queue is full; try again later", None, "queue_full", status=429, headers=_RETRY)

    def error_of(self, error: Exception) -> RequestError:
        """The error to send for a failed answer. Logs failures of the engine."""
        if isinstance(error, RequestError):
            return error
        if self.is_closing or isinstance(error, StateError):
            return closing_error()
        self.failed_at = self.engine.engine.worker.counts.num_tokens
        logger.error("an answer failed: %s", error if isinstance(error, AmusdError) else place_of(error))
        return RequestError("the engine failed at this answer", status=500, code="engine_failed")


@dataclass(eq=False)
class PendingResponse:
    """The response to one request, an ASGI application. It raises `RequestError` only before anything is sent.

    When the client leaves, its answers end before the next pass.
    """

    _service: Service
    _body: Body
    _params: SamplingParams
    _began: float = field(default_factory=time.perf_counter)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    answers: list[Answer] = field(default_factory=list)
    num_answers: int = 0
    """Answers that take room in the queue, submitted or not."""
    _has_failed: bool = False
    """Whether the stream has sent an error."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as one object or as server-sent events."""
        self._service.requests.add(self)
        is_whole = False
        try:
            is_whole = await unless_gone(receive, self._answer(scope, receive, send))
        finally:
            self._service.requests.remove(self)
            if self.answers:
                self._service.metrics.ended(self._began, is_whole and not self._has_failed)
            for answer in self.answers:
                answer.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            writer = await self._submit()
            document = None if self._body.stream else await self._whole(writer)
        except Exception as error:
            raise self._error_of(error) from error
        if document is None:
            await event_stream(self._events(writer)).stream_response(send)
        else:
            await JSONResponse(document)(scope, receive, send)

    def _error_of(self, error: Exception) -> RequestError:
        if isinstance(error, ConfigError) and len(self.answers) < self.num_answers:  # a mistake in the request
            return config_error(error, "messages" if self._body.is_chat and str(error).startswith("prompt") else None)
        return self._service.error_of(error)

    async def _submit(self) -> Writer:
        service, body, engine = self._service, self._body, self._service.engine
        prompts = body.prompts
        number = len(prompts) * body.n
        service.check_room(number, "n" if body.n > 1 else "prompt")
        self.num_answers = number
        encode = partial(engine.engine.encode, raw=not body.is_chat, template=body.chat_template_kwargs)
        encoded = [await asyncio.to_thread(encode, prompt) for prompt in prompts]
        places = [(ids, choice) for ids in encoded for choice in range(body.n)]
        decoding = replace(service.decoding, mode=body.mode or service.decoding.mode)
        for ids, choice in places:
            params = replace(self._params, seed=(self._params.seed + choice) & SEED_MASK)
            self.answers.append(await engine.submit(ids, params, self._news, decoding=decoding))
        num_prompt_tokens, seed = sum(map(len, encoded)), self._params.seed
        decoders = [IncrementalDecoder(engine.engine.tokenizer, ids) for ids, _ in places]
        return Writer(body, decoders, model=service.model, seed=seed, num_prompt_tokens=num_prompt_tokens)

    async def _whole(self, writer: Writer) -> dict[str, Any]:
        tokens: list[list[Token]] = [[] for _ in self.answers]
        async for index, piece in self._pieces():
            tokens[index] += piece
        return writer.whole([(tokens[index], answer.generation) for index, answer in enumerate(self.answers)])

    async def _events(self, writer: Writer) -> AsyncGenerator[bytes, None]:
        try:
            yield b"".join(map(event, writer.opening()))
            async for index, tokens in self._pieces():
                generation = None if tokens else self.answers[index].generation
                yield b"".join(map(event, writer.more(index, tokens, generation)))
        except Exception as error:  # noqa: BLE001 - the status is sent, so the stream tells the client
            self._has_failed = True
            yield event(self._error_of(error).body)
        yield DONE

    async def _pieces(self) -> AsyncGenerator[tuple[int, list[Token]], None]:
        metrics, has_begun = self._service.metrics, set[int]()
        async for index, tokens in read(self.answers, self._news):
            if tokens and index not in has_begun:
                metrics.on_first_token(self._began)
                has_begun.add(index)
            elif not tokens:
                metrics.finished(self.answers[index].generation)
            yield index, tokens


def event_stream(events: AsyncGenerator[bytes, None]) -> StreamingResponse:
    """Server-sent events, until they end or the client goes away."""
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Do `work`, and cancel it if the client leaves; return whether `work` ended. The body must be read before."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if is_whole := working.done():
            working.result()  # raises the error of `work`
        return is_whole
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def place_of(error: Exception) -> str:
    """Type and place of an error, without the message, which may quote a request."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {frame.filename}:{frame.lineno} ({frame.name})"


def closing_error() -> RequestError:
    """The error for clients when the server ends."""
    return RequestError("the server is shutting down", None, "shutting_down", status=503, headers=_RETRY)
