"""The facade for asyncio: an engine in its own thread, so that no event loop blocks.

    async with AsyncEngine.launch(target="embedded", drafter="ngram") as engine:
        async for token in engine.stream("Why is the sky blue?", SamplingParams(max_new_tokens=64)):
            print(token.text, end="")

Tasks of any event loop may use it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from typing_extensions import Self, Unpack

from amusd.answer import Answer, Generation
from amusd.checkpoints.tokenizer import Prompt
from amusd.config import SamplingParams
from amusd.engine import Engine, Options
from amusd.errors import StateError
from amusd.types import Token

LOOK_SECONDS = 1.0
"""Seconds between looks for a lost draft while idle."""


class AsyncEngine:
    """An `Engine` for asyncio. Make one with `launch`; use `async with`."""

    engine: Engine
    """The engine, set by `async with`. Any thread may read its counts and use its tokenizer."""

    def __init__(self, make: Callable[[], Engine]) -> None:
        """`make` runs in the engine's thread."""
        self._make = make
        self._made: Future[Engine] = Future()
        self._asked = threading.Event()
        """Set when there is work."""
        self._is_closing = False
        self._thread = threading.Thread(target=self._live, name="amusd engine", daemon=True)

    @classmethod
    def launch(cls, **settings: Any) -> AsyncEngine:
        """As `Engine.launch`; `async with` raises its errors."""
        return cls(partial(Engine.launch, **settings))

    async def __aenter__(self) -> Self:
        self._thread.start()
        try:
            self.engine = await asyncio.shield(asyncio.wrap_future(self._made))
        except BaseException:
            self._begin_closing()  # the engine may yet be made
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End unfinished answers, and close the engine after the present pass. Idempotent."""
        self._begin_closing()
        if self._made.done():
            await asyncio.to_thread(self._thread.join)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> Generation:
        """Return the whole answer; arguments of `Engine.stream`. Cancelling the task ends the answer."""
        news = asyncio.Event()
        answer = await self.submit(prompt, params, news, **options)
        try:
            async for _ in read([answer], news):
                pass
            return answer.generation
        finally:
            answer.cancel()

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[Token, None]:
        """Yield the answer token by token; arguments of `Engine.stream`.

        Closing the generator or cancelling its task ends the answer before the next pass.
        """
        news = asyncio.Event()
        answer = await self.submit(prompt, params, news, **options)
        try:
            async for _, tokens in read([answer], news):
                for token in tokens:
                    yield token
        finally:
            answer.cancel()

    async def submit(
        self, prompt: Prompt, params: SamplingParams | None, news: asyncio.Event, **options: Unpack[Options]
    ) -> Answer:
        """As `Engine.submit`; `news` is set when a token can be read or the answer is over."""
        # in another thread, since a long prompt takes long to encode
        answer = await asyncio.to_thread(self.engine.stream, prompt, params, **options)
        answer.on_news = partial(_set, news, asyncio.get_running_loop())
        self.engine.scheduler.enqueue(answer)
        self._asked.set()
        return answer

    def _begin_closing(self) -> None:
        self._is_closing = True
        self._asked.set()

    def _live(self) -> None:
        """Make and run the engine: the body of the thread."""
        try:
            engine = self._make()
        except BaseException as error:  # noqa: BLE001 - raised again, where the engine is awaited
            self._made.set_exception(error)
            return
        self._made.set_result(engine)
        with engine, suppress(StateError):  # another thread has closed the engine
            while not self._is_closing:
                if not engine.scheduler.step():
                    self._asked.wait(LOOK_SECONDS)
                self._asked.clear()


async def read(answers: Sequence[Answer], news: asyncio.Event) -> AsyncGenerator[tuple[int, list[Token]], None]:
    """Yield (index, new tokens) of each answer, and (index, []) at its end. Raises a failed answer's error.

    `news`: the event given to `submit` for all answers.
    """
    reading = dict(enumerate(answers))
    while reading:
        await news.wait()
        news.clear()
        for index, answer in tuple(reading.items()):
            is_over = answer.is_over  # read first: it is set after the last tokens
            if tokens := answer.read_available():
                yield index, tokens
            if is_over:
                answer.result()
                del reading[index]
                yield index, []


def _set(news: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
    if not news.is_set():  # `read` clears the event before it reads
        with suppress(RuntimeError):  # the event loop is closed: nothing waits
            loop.call_soon_threadsafe(news.set)
