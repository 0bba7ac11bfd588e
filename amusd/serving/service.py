"""The life of a request: a place in the queue, its answers, and their end when the client goes away."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from amusd.answer import Generation, Token
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
RETRY_SECONDS = 1
"""The value of `Retry-After` if the queue is full, or the server is about to end."""


class Service:
    """Answers plans with an engine. For one event loop."""

    def __init__(
        self,
        engine: AsyncEngine,
        config: ServeConfig,
        *,
        model: str,
        fingerprint: str,
        decoding: DecodingConfig,
        limits: Limits,
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
        self._fingerprint = fingerprint
        self._answers: set[AsyncAnswer] = set()
        self._num_promised = 0
        """Answers that have a place, and are not submitted yet."""
        self._may_be_broken = False
        """The engine has failed at the last answer that came to its end."""
        self.metrics = ServerMetrics(model, lambda: engine.engine.status)

    # What it says of itself

    @property
    def num_in_flight(self) -> int:
        """Answers that are computed or wait; one whose client only reads slowly is none of them."""
        self._answers = {answer for answer in self._answers if not answer.is_over}
        return len(self._answers) + self._num_promised

    @property
    def _max_num_seqs(self) -> int:
        return self.engine.engine.worker.max_num_seqs

    async def health(self) -> tuple[int, dict[str, Any]]:
        """Status and document: 200 only when a token could be made. Behind a failure, one is made to find out."""
        state = "ok"
        if self.is_closing:
            state = "shutting down"
        else:
            try:
                self.engine.engine.turns.check()
                if self._may_be_broken:
                    await self.engine.generate([0, 0], _ONE_TOKEN, decoding=_PLAIN)
                    self._may_be_broken = False
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

    # Requests

    async def respond(self, plan: Plan, receive: Receive) -> Response:
        """Have a plan answered. Raises `RequestError` as long as nothing is sent.

        When the client goes away, its answers end before another pass over them begins.
        """
        request = _Request(self, plan)
        try:
            response = await unless_gone(receive, request.stream() if plan.streams else request.whole())
        except BaseException:
            request.cancel()
            raise
        if response is None:
            request.cancel()
            self.metrics.aborted()
            return Response(status_code=499)  # which goes nowhere
        return response

    def writer(self, plan: Plan, prompts: Sequence[Sequence[int]]) -> Writer:
        """Return the writer of the answer to a request. `prompts`: token ids of those of the plan."""
        tokenizer = self.engine.engine.tokenizer
        return Writer(
            plan,
            identity=secrets.token_hex(12),
            created=int(time.time()),
            model=self.model,
            fingerprint=self._fingerprint,
            make_decoder=lambda index: IncrementalDecoder(tokenizer, prompts[index // plan.num_choices]),
        )

    @contextmanager
    def place(self, plan: Plan) -> Iterator[None]:
        """Room for the answers of a plan until they are submitted. Raises `RequestError` where the queue is full."""
        number, room = plan.num_answers, self._max_num_seqs + self.config.max_queue
        if number > room:
            param = "n" if plan.num_choices > 1 else "prompt"
            raise RequestError(f"{param}: {number} answers are more than this server takes, {room}", param=param)
        if self.num_in_flight + number > room:
            raise RequestError(
                "the queue is full; try again later",
                code="queue_full",
                status=429,
                headers={"Retry-After": str(RETRY_SECONDS)},
            )
        self._num_promised += number
        try:
            yield
        finally:
            self._num_promised -= number

    def keep(self, answers: Sequence[AsyncAnswer]) -> None:
        """Count answers as in flight until they are over."""
        self._answers.update(answers)

    def finished(self, generation: Generation) -> None:
        """An answer is complete."""
        self._may_be_broken = False
        self.metrics.finished(generation)

    def error_of(self, error: Exception, plan: Plan) -> RequestError:
        """Return the error for the client of an answer that failed."""
        if isinstance(error, RequestError):
            return error
        if isinstance(error, ConfigError) and not isinstance(error, NotFiniteError):
            return config_error(error, "messages" if plan.is_chat and str(error).startswith("prompt") else None)
        if self.is_closing or isinstance(error, StateError):
            return closing_error()
        self._may_be_broken = True
        return RequestError("the engine failed at this answer", status=500, code="engine_failed")


class _Request:
    """One request while it is answered."""

    def __init__(self, service: Service, plan: Plan) -> None:
        self._service = service
        self._plan = plan
        self._began = time.perf_counter()
        self._answers: list[AsyncAnswer] = []
        self._num_prompt_tokens = 0
        self._writer: Writer

    async def whole(self) -> Response:
        """The answer as one object."""
        await self._submit()
        try:
            tokens: list[list[Token]] = [[] for _ in self._answers]
            async with aclosing(self._pieces()) as all_pieces:
                async for pieces in all_pieces:
                    for index, chunk in pieces:
                        tokens[index] += chunk or ()
        except Exception as error:
            raise self._service.error_of(error, self._plan) from error
        answers = [(tokens[index], answer.generation) for index, answer in enumerate(self._answers)]
        document = self._writer.whole(self._num_prompt_tokens, answers)
        self._service.metrics.ended(self._began)
        return JSONResponse(document)

    async def stream(self) -> Response:
        """The answer as server-sent events; what is wrong with the request is raised before they begin."""
        await self._submit()
        return EventStream(self._events(), self.cancel, self._service.metrics.aborted)

    def cancel(self) -> None:
        """End the answers that are not over."""
        for answer in self._answers:
            answer.cancel()

    async def _submit(self) -> None:
        """Queue the answers."""
        plan, engine = self._plan, self._service.engine
        try:
            with self._service.place(plan):
                prompts = [
                    await engine.encode(prompt, raw=not plan.is_chat, template=plan.template) for prompt in plan.prompts
                ]
                self._answers = [
                    engine.stream(prompt, plan.params_of(choice), decoding=plan.decoding)
                    for prompt in prompts
                    for choice in range(plan.num_choices)
                ]
                for answer in self._answers:
                    await answer.submit()
                self._service.keep(self._answers)
        except Exception as error:
            raise self._service.error_of(error, plan) from error
        self._writer = self._service.writer(plan, prompts)
        self._num_prompt_tokens = self._writer.num_prompt_tokens = sum(map(len, prompts))
        self._service.metrics.begun(self._num_prompt_tokens)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        writer = self._writer
        try:
            yield b"".join(map(event, writer.opening()))
            async with aclosing(self._pieces()) as all_pieces:
                async for pieces in all_pieces:
                    documents: list[dict[str, Any]] = []
                    for index, tokens in pieces:
                        if tokens is None:
                            documents += writer.closing(index, self._answers[index].generation)
                        elif (piece := writer.piece(index, tokens)) is not None:
                            documents.append(piece)
                    if documents:
                        yield b"".join(map(event, documents))
            self._service.metrics.ended(self._began)
            if self._plan.includes_usage:
                generations = [answer.generation for answer in self._answers]
                yield event(writer.usage_chunk(self._num_prompt_tokens, generations))
        except Exception as error:  # noqa: BLE001 - told to the client: the status is sent
            yield event(self._service.error_of(error, self._plan).body)
        yield DONE

    async def _pieces(self) -> AsyncGenerator[list[tuple[int, list[Token] | None]], None]:
        """The tokens that became readable together, by answer; None: the answer is complete."""
        reading = {asyncio.ensure_future(answer.chunk()): index for index, answer in enumerate(self._answers)}
        has_begun: set[int] = set()
        try:
            while reading:
                done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
                pieces: list[tuple[int, list[Token] | None]] = []
                for future in sorted(done, key=reading.__getitem__):
                    index, tokens = reading.pop(future), future.result()
                    self._count(index, tokens, has_begun)
                    pieces.append((index, tokens or None))
                    if tokens:
                        reading[asyncio.ensure_future(self._answers[index].chunk())] = index
                yield pieces
        finally:
            for future in reading:
                future.cancel()
            if reading:
                await asyncio.gather(*reading, return_exceptions=True)

    def _count(self, index: int, tokens: Sequence[Token], has_begun: set[int]) -> None:
        metrics = self._service.metrics
        if not tokens:
            self._service.finished(self._answers[index].generation)
            return
        if index not in has_begun:
            has_begun.add(index)
            metrics.first_token(time.perf_counter() - self._began)
        metrics.tokens(len(tokens))


class EventStream(Response):
    """Server-sent events, until they end or the client goes away."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], cancel: Callable[[], None], tell_gone: Callable[[], None]
    ) -> None:
        """`cancel` ends what makes the events, whatever happens; `tell_gone`: the client went away."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._cancel = cancel
        self._tell_gone = tell_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's
        """Send the events."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if await unless_gone(receive, self._send_all(send)) is None:
                self._tell_gone()
        finally:
            self._cancel()

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
    return RequestError(message, status=503, code="shutting_down", headers={"Retry-After": str(RETRY_SECONDS)})
