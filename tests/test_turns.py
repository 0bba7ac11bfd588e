"""Threads, event loops, interruptions and the end of an engine: answers come in turn, and nothing is left over."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import pytest
from runtime.pair import PROMPT, decoding, on_pass, oracle, pair, params, plain_engine, reference

from amusd import AsyncEngine
from amusd.async_engine import read
from amusd.drafters.synthetic import right_with_probability
from amusd.engine import Engine
from amusd.errors import ConfigError, StateError

FACTORIES = {"oracle": oracle(300, right_with_probability(0.7, 1))}
SCHEDULE = decoding("asynchronous")
DEADLINE_SECONDS = 60.0


def answer_of(num_tokens: int) -> tuple[int, ...]:
    return reference(num_tokens)[len(PROMPT) :]


def run_all(works: list[Callable[[], Any]]) -> list[Any]:
    """The result or the error of each, run in a thread of its own."""
    found: list[Any] = [None] * len(works)

    def run(number: int) -> None:
        try:
            found[number] = works[number]()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive()
    return found


def test_a_thread_does_not_wait_for_a_stream_that_another_one_does_not_read() -> None:
    with pair(FACTORIES) as (engine, _):
        unread = engine.stream(PROMPT, params(40), decoding=SCHEDULE)
        next(unread)
        (found,) = run_all([lambda: engine.generate(PROMPT, params(10), decoding=SCHEDULE).token_ids])
        assert found == answer_of(10)
        assert len(unread.token_ids) == 1
        assert [token.token_id for token in unread] == list(answer_of(40)[1:])


def test_a_stream_that_nobody_can_read_any_more_is_ended() -> None:
    with pair({}) as (engine, _):
        passes = on_pass(engine, lambda _number: None)
        stream = engine.stream(PROMPT, params(300))
        next(stream)
        del stream
        gc.collect()
        assert engine.generate(PROMPT, params(10)).token_ids == answer_of(10)
        assert passes[-1] == 11


def test_an_answer_can_be_cancelled_amid_a_pass_and_ends_before_the_next_one() -> None:
    with pair(FACTORIES) as (engine, _):
        stream = engine.submit(PROMPT, params(40), decoding=SCHEDULE)

        def cancel(number: int) -> None:
            if number == 3:
                run_all([stream.cancel])  # from another thread, which does not wait for the pass

        passes = on_pass(engine, cancel)
        found = tuple(token.token_id for token in stream)
        assert found == answer_of(40)[: len(found)]
        assert passes[-1] == 3
        assert not engine.scheduler.step()
        with pytest.raises(StateError, match=r"^the answer was cancelled$"):
            stream.result()


def test_an_engine_can_be_closed_while_another_thread_generates() -> None:
    with pair(FACTORIES) as (engine, draft):
        begun = threading.Event()

        def hold(_number: int) -> None:
            begun.set()
            while not engine.scheduler._is_closed:
                time.sleep(0.001)

        def close() -> None:
            assert begun.wait(DEADLINE_SECONDS)
            engine.close()

        on_pass(engine, hold)

        found, nothing = run_all([lambda: engine.generate(PROMPT, params(300), decoding=SCHEDULE), close])
    assert isinstance(found, StateError)
    assert str(found) == "the engine is closed: launch another one"
    assert nothing is None
    assert not draft.code


def test_nobody_can_ask_from_within_a_pass() -> None:
    with pair(FACTORIES) as (engine, _):
        errors: list[str] = []

        def ask(number: int) -> None:
            if number == 2:
                with pytest.raises(StateError) as caught:
                    engine.generate(PROMPT, params(5))
                errors.append(str(caught.value))

        on_pass(engine, ask)
        assert engine.generate(PROMPT, params(10), decoding=SCHEDULE).token_ids == answer_of(10)
    assert errors == ["the engine computes a pass in this thread: a signal handler cannot use it"]


def test_an_interruption_ends_the_answer_and_not_the_engine() -> None:
    with pair(FACTORIES) as (engine, draft):
        stream = engine.stream(PROMPT, params(40), decoding=SCHEDULE)

        def interrupt(number: int) -> None:
            if number == 3:
                raise KeyboardInterrupt

        on_pass(engine, interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
        with pytest.raises(StateError, match="interrupted"):
            next(stream)
        assert engine.generate(PROMPT, params(20), decoding=SCHEDULE).token_ids == answer_of(20)
    assert not draft.code


def test_an_answer_whose_admission_is_interrupted_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = plain_engine()
    stream = engine.stream(PROMPT, params(4))
    with monkeypatch.context() as interrupted:
        interrupted.setattr(engine.worker, "admit", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    (found,) = run_all([lambda: next(stream)])
    assert str(found) == "the answer was interrupted"
    assert engine.generate(PROMPT, params(4)).token_ids == answer_of(4)


def test_what_an_interrupted_admission_has_begun_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(FACTORIES) as (engine, _):
        opened, client = engine.worker.client.open, engine.worker.client

        def open_and_interrupt(*args: Any) -> None:
            opened(*args)
            raise KeyboardInterrupt

        with monkeypatch.context() as interrupted:
            interrupted.setattr(client, "open", open_and_interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.generate(PROMPT, params(200), decoding=SCHEDULE)
        found = engine.generate(PROMPT, params(20), decoding=SCHEDULE)
        assert found.token_ids == answer_of(20)
        assert engine.worker.counts.num_tokens == 20
        assert (found.metrics.num_verified > 0, client._sequences) == (True, {})


def test_an_error_is_raised_where_its_own_answer_is_read() -> None:
    with pair(FACTORIES) as (engine, _):
        failing, whole = (engine.stream(PROMPT, params(20), decoding=SCHEDULE) for _ in range(2))
        next(failing)

        def fail(number: int) -> None:
            if number == 1:
                raise ConfigError("a pass went wrong")

        on_pass(engine, fail)
        assert [token.token_id for token in whole] == list(answer_of(20))
        with pytest.raises(ConfigError, match="went wrong"):
            list(failing)


def test_a_fork_leaves_the_engine_to_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(FACTORIES) as (engine, draft):
        stream = engine.stream(PROMPT, params(40), decoding=SCHEDULE)
        next(stream)
        own = os.getpid()
        with monkeypatch.context() as fork:
            fork.setattr(os, "getpid", lambda: own + 1)
            with pytest.raises(StateError, match=f"^the engine belongs to process {own}, not to a fork of it"):
                engine.generate(PROMPT)
            engine.close()
        assert [token.token_id for token in stream] == list(answer_of(40)[1:])
    assert not draft.code


# The engine for asyncio blocks no event loop, and cancels answers without a reader


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


def test_a_task_that_waits_for_an_answer_hears_that_another_one_has_cancelled_it() -> None:
    async def work() -> None:
        async with launched(max_num_seqs=1) as (engine, own):
            passes, goes_on = hold(own)
            first = asyncio.ensure_future(engine.generate(PROMPT, params(LONG)))
            await until(lambda: passes[-1] > 3)
            news = asyncio.Event()
            queued = await engine.submit(PROMPT, params(5), news)
            waiting = asyncio.ensure_future(anext(read([queued], news)))
            await asyncio.sleep(0)
            with pytest.raises(StateError, match=r"^the answer is not finished"):
                _ = queued.generation
            queued.cancel()
            try:
                with pytest.raises(StateError, match=r"^the answer was cancelled$"):
                    await asyncio.wait_for(waiting, DEADLINE_SECONDS / 10)
            finally:
                goes_on.set()
                first.cancel()

    run(work())


def test_closing_ends_what_is_read_and_what_is_asked() -> None:
    async def work() -> None:
        async with launched(max_num_seqs=1) as (engine, own):
            passes, goes_on = hold(own)
            reading = [asyncio.ensure_future(engine.generate(PROMPT, params(LONG))) for _ in range(2)]
            await until(lambda: passes[-1] > 3)
            closing = asyncio.ensure_future(engine.aclose())
            await until(lambda: engine._is_closing)
            assert not closing.done()  # the pass is waited for
            goes_on.set()
            await closing
            await engine.aclose()
            found = await asyncio.gather(*reading, engine.generate(PROMPT), return_exceptions=True)
            assert [str(error) for error in found] == ["the engine is closed: launch another one"] * 3
            assert not engine._thread.is_alive()

    run(work())
