"""The engine for asyncio: it blocks no event loop, ends what nobody waits for, and says where an answer is read."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from runtime.pair import PROMPT, on_pass, params, plain_engine
from test_turns import DEADLINE_SECONDS, answer_of

from amusd import AsyncEngine
from amusd.engine import Engine

LONG = 300


@asynccontextmanager
async def launched(max_num_seqs: int = 4) -> AsyncIterator[tuple[AsyncEngine, Engine]]:
    engine = plain_engine(max_num_seqs)
    async with AsyncEngine(lambda: engine) as asynchronous:
        yield asynchronous, engine


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, DEADLINE_SECONDS))


def hold(engine: Engine) -> tuple[list[int], threading.Event]:
    """Hold the fourth pass until the event is set, so that no answer is over before it is looked at."""
    goes_on = threading.Event()
    return on_pass(engine, lambda number: number < 4 or goes_on.wait(DEADLINE_SECONDS)), goes_on


def is_wanted(engine: Engine) -> bool:
    answers = [reference() for reference in engine.scheduler._at_work.values()]
    return any(answer is not None and not answer.is_over for answer in answers)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - what is waited for happens in another thread
        await asyncio.sleep(0.001)


def test_the_event_loop_runs_while_a_pass_is_computed() -> None:
    async def work() -> None:
        async with launched() as (engine, own):
            loop = asyncio.get_running_loop()
            turns: list[bool] = []

            def ask_the_loop(_number: int) -> None:
                turned = threading.Event()
                loop.call_soon_threadsafe(turned.set)
                turns.append(turned.wait(DEADLINE_SECONDS / 2))

            on_pass(own, ask_the_loop)
            assert (await engine.generate(PROMPT, params(5))).token_ids == answer_of(5)
            reading = asyncio.ensure_future(engine.generate(PROMPT, params(LONG)))
            await until(lambda: len(turns) > 10)
            reading.cancel()
            await asyncio.wait([reading])
            await engine.aclose()
            assert all(turns)

    run(work())


@pytest.mark.parametrize("how", ["leave", "fail", "time out", "cancel"])
def test_an_answer_that_nobody_reads_any_more_is_ended(how: str) -> None:
    async def read(engine: AsyncEngine) -> None:
        async for _ in engine.stream(PROMPT, params(LONG)):
            if how == "leave":
                break
            if how == "fail":
                raise ZeroDivisionError
            await asyncio.sleep(0 if how == "time out" else DEADLINE_SECONDS)

    async def work() -> None:
        async with launched(max_num_seqs=1) as (engine, own):
            passes, goes_on = hold(own)
            if how == "cancel":
                answer = engine.stream(PROMPT, params(LONG))
                assert (await anext(answer)).token_id == answer_of(1)[0]
                await answer.aclose()
            elif how == "leave":
                await read(engine)
            else:
                with pytest.raises(ZeroDivisionError if how == "fail" else asyncio.TimeoutError):
                    await asyncio.wait_for(read(engine), 0.2 if how == "time out" else DEADLINE_SECONDS)
            gc.collect()
            await until(lambda: not is_wanted(own))
            goes_on.set()
            await until(lambda: not own.worker.sequences)
            assert not own.scheduler._at_work
            assert passes[-1] <= 4
            assert (await engine.generate(PROMPT, params(5))).token_ids == answer_of(5)

    run(work())


def test_closing_ends_what_is_read_and_what_is_asked() -> None:
    async def work() -> None:
        async with launched(max_num_seqs=1) as (engine, own):
            passes, goes_on = hold(own)
            reading = [asyncio.ensure_future(engine.generate(PROMPT, params(LONG))) for _ in range(2)]
            await until(lambda: passes[-1] > 3)
            closing = asyncio.ensure_future(engine.aclose())
            await until(lambda: engine._is_closing)
            goes_on.set()
            await closing
            await engine.aclose()
            found = await asyncio.gather(*reading, engine.generate(PROMPT), return_exceptions=True)
            assert [str(error) for error in found] == ["the engine is closed: launch another one"] * 3
            assert not engine._thread.is_alive() or engine._thread.join(DEADLINE_SECONDS) is None

    run(work())
