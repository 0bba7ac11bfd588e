"""The facade for asyncio: an engine in a thread of its own, which no event loop ever waits for.

    async with AsyncEngine.launch(target="embedded", drafter="ngram") as engine:
        async for token in engine.stream("Why is the sky blue?", SamplingParams(max_new_tokens=64)):
            print(token.text, end="")

The thread launches the engine, computes while answers are queued, and closes it. Tasks of any event loops may ask.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from typing_extensions import Self, Unpack

from amusd.answer import Answer, Generation, Token
from amusd.config import SamplingParams
from amusd.engine import Engine, Options, Prompt
from amusd.errors import StateError

LOOK_SECONDS = 1.0
"""How long the thread sleeps at most where nothing is queued."""


class AsyncEngine:
    """An `Engine` for asyncio. Make one with `launch`; use `async with`, or `await` it and `aclose` it in the end."""

    def __init__(self, make: Callable[[], Engine]) -> None:
        """`make` is called in the thread, which begins with `async with` or `await`."""
        self._make = make
        self._made: Future[Engine] = Future()
        self._ended: Future[None] = Future()
        self._condition = threading.Condition()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event, Answer]] = []
        """Events to set, in their loops, when there is news of an answer."""
        self._has_work = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._live, name="amusd engine", daemon=True)

    @classmethod
    def launch(cls, **settings: Any) -> AsyncEngine:
        """As `Engine.launch`; what that raises, `async with` raises."""
        return cls(partial(Engine.launch, **settings))

    def __await__(self) -> Any:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        self._thread.start()
        try:
            await asyncio.shield(asyncio.wrap_future(self._made))
        except BaseException:
            self._begin_closing()  # the engine may come yet
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End unfinished answers, and close the engine behind the pass that is being computed. Idempotent."""
        self._begin_closing()
        if self._made.done():
            await asyncio.shield(asyncio.wrap_future(self._ended))

    @property
    def engine(self) -> Engine:
        """The engine that the thread computes with: for its `status`, which any thread may read, and its tokenizer.

        Raises `StateError` before it is launched.
        """
        if not self._made.done():
            raise StateError("the engine is not launched: use `async with`, or `await` it")
        return self._made.result()

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> Generation:
        """The whole answer; arguments as of `Engine.stream`. Cancelling the task ends it."""
        return await self.stream(prompt, params, **options).result()

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]) -> AsyncAnswer:
        """The answer token by token; arguments as of `Engine.stream`. What is wrong with them is raised by reading."""
        return AsyncAnswer(self, partial(self._submit, prompt, params, **options))

    async def encode(
        self, prompt: Prompt, *, raw: bool = False, template: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        """As `Engine.encode`, which takes its time over a long prompt: in another thread."""
        return await asyncio.to_thread(self.engine.encode, prompt, raw=raw, template=template)

    def _submit(self, *request: Any, **options: Any) -> Answer:
        answer = self.engine.submit(*request, **options)
        with self._condition:
            self._has_work = True
            self._condition.notify()
        return answer

    async def await_news(self, answer: Answer) -> None:
        """Return when a token can be read, or the answer is over; for `AsyncAnswer`.

        Raises `StateError` when the engine is closed.
        """
        while True:
            with self._condition:
                if answer.has_news:
                    return
                self._made.result().turns.check()
                news = asyncio.Event()
                self._waiting.append((asyncio.get_running_loop(), news, answer))
            await news.wait()

    # What the thread does

    def _live(self) -> None:
        try:
            engine = self._make()
        except BaseException as error:  # noqa: BLE001 - raised again, where the engine is awaited
            self._ended.set_result(None)
            self._made.set_exception(error)
            return
        self._made.set_result(engine)
        try:
            while self._sleep_until_work(engine):
                self._wake(is_any_left=engine.turns.step())
        except StateError:
            pass  # somebody else has closed it, which is said where an answer is read
        finally:
            try:
                engine.close()
                self._ended.set_result(None)
            except BaseException as error:  # noqa: BLE001 - raised again by `aclose`
                self._ended.set_exception(error)
            self._wake(is_any_left=False)

    def _sleep_until_work(self, engine: Engine) -> bool:
        """Whether there is something to compute; False when the engine is to be closed.

        Meanwhile a draft that is lost is noticed, and replaced.
        """
        while True:
            with self._condition:
                if not (self._has_work or self._is_closing):
                    self._condition.wait(LOOK_SECONDS)
                if self._has_work or self._is_closing:
                    self._has_work = False
                    return not self._is_closing
            engine.turns.look_after_draft()

    def _wake(self, *, is_any_left: bool) -> None:
        """Wake those that wait for an answer with news, and all once the engine is closed."""
        with self._condition:
            self._has_work |= is_any_left
            waiting, self._waiting = self._waiting, []
            for loop, news, answer in waiting:
                if not (answer.has_news or self._ended.done()):
                    self._waiting.append((loop, news, answer))
                    continue
                with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(news.set)

    def _begin_closing(self) -> None:
        with self._condition:
            self._is_closing = True
            self._condition.notify()


@dataclass(eq=False, repr=False)
class AsyncAnswer:
    """Iterates over the tokens of one answer; afterwards `generation` holds the whole. For one task at a time.

    It ends early with `cancel`, with the task that waits for a token, or when it is no longer referenced: its slot is
    free before another pass begins.
    """

    _engine: AsyncEngine
    _submit: Callable[[], Answer]
    _answer: Answer | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        """The next token. Raises as `Answer` does."""
        for token in await self._with_news():
            return token
        raise StopAsyncIteration

    async def chunk(self) -> list[Token]:
        """All tokens that can be read now, at least one; none: the answer is over. Raises as `Answer` does."""
        answer = await self._with_news()
        return list(islice(answer, answer.num_unread or 1))

    async def submit(self) -> Answer:
        """Have the answer computed from now on; returns the engine's. Raises what is wrong with its arguments."""
        if self._answer is None:
            self._answer = await asyncio.to_thread(self._submit)  # taking a long prompt apart takes its time
        return self._answer

    async def _with_news(self) -> Answer:
        """The answer, once a token of it can be read, or it is over."""
        answer = await self.submit()
        try:
            await self._engine.await_news(answer)
        except asyncio.CancelledError:
            answer.cancel()
            raise
        return answer

    async def result(self) -> Generation:
        """Read all that is left, and return the finished answer. Raises as reading does."""
        async for _ in self:
            pass
        return self.generation

    @property
    def generation(self) -> Generation:
        """The finished answer. Raises `StateError` before the last token was read."""
        if self._answer is None:
            raise StateError("the answer is not finished: read all its tokens first")
        return self._answer.generation

    @property
    def is_over(self) -> bool:
        """Nothing more will be computed."""
        return self._answer is not None and self._answer.is_over

    def cancel(self) -> None:
        """End the answer; what is there can be read."""
        if self._answer is not None:
            self._answer.cancel()
