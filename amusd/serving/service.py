"""The life of a request: a place in the queue, its answers, and their end when the client goes away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from amusd.answer import Token
from amusd.async_engine import AsyncAnswer, AsyncEngine
from amusd.config import DecodingConfig, SamplingParams, ServeConfig
from amusd.errors import ConfigError, NotFiniteError, StateError
from amusd.models.tokenizer import IncrementalDecoder
from amusd.serving.metrics import ServerMetrics
from amusd.serving.requests import Limits, Plan, RequestError, config_error
from amusd.serving.responses import DONE, Writer, event
from amusd.types import Mode

T = TypeVar("T")
_PLAIN = DecodingConfig(mode=Mode.AUTOREGRESSIVE)
_ONE_TOKEN = SamplingParams(max_new_tokens=1)
_RETRY = {"Retry-After": "1"}
"""The header of an error that passes; seconds."""


class Service:
    """Answers plans with an engine. For one event loop."""

    def __init__(
        self, engine: AsyncEngine, config: ServeConfig, *, model: str, decoding: DecodingConfig, limits: Limits
    ) -> None:
        self.engine = engine
        self.config = config
        self.model = model
        self.decoding = decoding
        """The schedule of requests that name none."""
        self.limits = limits
        self.began = int(time.time())
        self.is_closing = False
        """No further request is taken."""
        self.requests: set[AnsweredRequest] = set()
        self.may_be_broken = False
        """The engine has failed at the last answer that came to its end."""
        self.metrics = ServerMetrics(model, lambda: engine.engine.status)

    @property
    def num_in_flight(self) -> int:
        """Answers that are computed or wait; one whose client only reads slowly is none of them."""
        return sum(not answer.is_over for request in self.requests for answer in request.answers)

    async def health(self) -> tuple[int, dict[str, Any]]:
        """Status and document: 200 only when a token could be made. Behind a failure, one is made to find out."""
        state = "ok"
        if self.is_closing:
            state = "shutting down"
        else:
            try:
                self.engine.engine.turns.check()
                if self.may_be_broken:
                    await self.engine.generate([0, 0], _ONE_TOKEN, decoding=_PLAIN)
                    self.may_be_broken = False
            except Exception as error:  # noqa: BLE001 - whatever it is, there are no tokens
                state = f"failing: {type(error).__name__}"
        status = self.engine.engine.status
        document = {
            "status": state,
            "draft": status.draft.value,
            "num_draft_restarts": status.num_draft_restarts,
            "num_requests_running": status.num_running,
            "num_requests_waiting": status.num_waiting,
        }
        return (200 if state == "ok" else 503), document

    async def respond(self, plan: Plan, receive: Receive) -> Response:
        """Have a plan answered. Raises `RequestError` as long as nothing is sent.

        When the client goes away, its answers end before another pass over them begins.
        """
        request = AnsweredRequest(self, plan)
        try:
            response = await unless_gone(receive, request.stream() if plan.streams else request.whole())
        except BaseException:
            request.end(is_whole=False)
            raise
        if response is None:
            request.end(is_whole=False)
            return Response(status_code=499)  # which goes nowhere
        return response

    def check_room(self, plan: Plan) -> None:
        """Raise `RequestError` where the queue is full."""
        number, room = plan.num_answers, self.engine.engine.worker.max_num_seqs + self.config.max_queue
        if number > room:
            param = "n" if plan.num_choices > 1 else "prompt"
            raise RequestError(f"{param}: {number} answers are more than this server takes, {room}", param=param)
        if self.num_in_flight + number > room:
            message = "the queue is full; try again later"
            raise RequestError(message, code="queue_full", status=429, headers=_RETRY)

    def error_of(self, error: Exception, plan: Plan) -> RequestError:
        """Return the error for the client of an answer that failed."""
        if isinstance(error, RequestError):
            return error
        if isinstance(error, ConfigError) and not isinstance(error, NotFiniteError):
            return config_error(error, "messages" if plan.is_chat and str(error).startswith("prompt") else None)
        if self.is_closing or isinstance(error, StateError):
            return closing_error()
        self.may_be_broken = True
        return RequestError("the engine failed at this answer", status=500, code="engine_failed")


class AnsweredRequest:
    """One request while it is answered."""

    def __init__(self, service: Service, plan: Plan) -> None:
        self._service = service
        self._plan = plan
        self._began = time.perf_counter()
        self.answers: list[AsyncAnswer] = []
        self._writer: Writer

    async def whole(self) -> Response:
        """The answer as one object."""
        await self._submit()
        try:
            tokens: list[list[Token]] = [[] for _ in self.answers]
            async with aclosing(self._pieces()) as all_pieces:
                async for pieces in all_pieces:
                    for index, chunk in pieces:
                        tokens[index] += chunk
        except Exception as error:
            raise self._service.error_of(error, self._plan) from error
        answers = [(tokens[index], answer.generation) for index, answer in enumerate(self.answers)]
        self.end(is_whole=True)
        return JSONResponse(self._writer.whole(answers))

    async def stream(self) -> Response:
        """The answer as server-sent events; what is wrong with the request is raised before they begin."""
        await self._submit()
        return EventStream(self._events(), self.end)

    def end(self, is_whole: bool) -> None:
        """Give the place back, and end the answers that are not over."""
        if self in self._service.requests:
            self._service.requests.remove(self)
            self._service.metrics.ended(self._began, is_whole)
        for answer in self.answers:
            answer.cancel()

    async def _submit(self) -> None:
        """Queue the answers."""
        plan, service, engine = self._plan, self._service, self._service.engine
        try:
            service.check_room(plan)
            prompts = [
                await engine.encode(prompt, raw=not plan.is_chat, template=plan.template) for prompt in plan.prompts
            ]
            service.check_room(plan)  # others may have come meanwhile
            self.answers = [
                engine.stream(prompt, plan.params_of(choice), decoding=plan.decoding)
                for prompt in prompts
                for choice in range(plan.num_choices)
            ]
            service.requests.add(self)
            for answer in self.answers:
                await answer.submit()
        except Exception as error:
            raise service.error_of(error, plan) from error
        tokenizer = engine.engine.tokenizer
        self._writer = Writer(
            plan,
            model=service.model,
            num_prompt_tokens=sum(map(len, prompts)),
            make_decoder=lambda index: IncrementalDecoder(tokenizer, prompts[index // plan.num_choices]),
        )
        service.metrics.begun(self._writer.num_prompt_tokens)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        writer = self._writer
        try:
            yield b"".join(map(event, writer.opening()))
            async with aclosing(self._pieces()) as all_pieces:
                async for pieces in all_pieces:
                    documents: list[dict[str, Any]] = []
                    for index, tokens in pieces:
                        if not tokens:
                            documents += writer.closing(index, self.answers[index].generation)
                        elif (piece := writer.piece(index, tokens)) is not None:
                            documents.append(piece)
                    if documents:
                        yield b"".join(map(event, documents))
            if self._plan.includes_usage:
                yield event(writer.usage_chunk([answer.generation for answer in self.answers]))
        except Exception as error:  # noqa: BLE001 - told to the client: the status is sent
            yield event(self._service.error_of(error, self._plan).body)
        yield DONE

    async def _pieces(self) -> AsyncGenerator[list[tuple[int, Sequence[Token]]], None]:
        """The tokens that became readable together, by answer; none: the answer is complete."""
        reading = {asyncio.ensure_future(answer.chunk()): index for index, answer in enumerate(self.answers)}
        has_begun: set[int] = set()
        try:
            while reading:
                done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
                pieces: list[tuple[int, Sequence[Token]]] = []
                for future in sorted(done, key=reading.__getitem__):
                    index, tokens = reading.pop(future), future.result()
                    pieces.append((index, tokens))
                    if tokens:
                        self._service.metrics.came(len(tokens), None if index in has_begun else self._began)
                        has_begun.add(index)
                        reading[asyncio.ensure_future(self.answers[index].chunk())] = index
                    else:
                        self._service.may_be_broken = False
                        self._service.metrics.finished(self.answers[index].generation)
                yield pieces
        finally:
            for future in reading:
                future.cancel()
            await asyncio.gather(*reading, return_exceptions=True)


class EventStream(Response):
    """Server-sent events, until they end or the client goes away."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], end: Callable[[bool], None] = lambda _: None) -> None:
        """`end` is called in the end, whatever happens, with whether everything was sent."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's
        """Send the events."""
        is_whole = None
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            is_whole = await unless_gone(receive, self._send_all(send))
        finally:
            self._end(bool(is_whole))

    async def _send_all(self, send: Send) -> bool:
        async with aclosing(self._events) as events:
            async for body in events:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        return True


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, which is cancelled when the client goes away: None then. The body has been read before."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def closing_error() -> RequestError:
    """Return the error for a client that comes, or still waits, when the server ends."""
    message = "the server is shutting down"
    return RequestError(message, status=503, code="shutting_down", headers=_RETRY)
