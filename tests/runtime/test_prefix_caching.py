"""The common beginning of two prompts is computed once, and the answers are those of a fresh engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from models.test_decoder import Case, lean_model, stock_model
from models.tiny import VOCAB
from runtime.pair import WIDTH, decoding, engine_of
from table_model import TableModel, TableTokenizer

from amusd.answer import Generation
from amusd.config import DecodingConfig, SamplingParams
from amusd.drafters.model import ModelDrafter
from amusd.engine import Engine
from amusd.models.numerics import Numerics
from amusd.runner.model_runner import ModelRunner

CHUNK = 16
FIXED = Numerics(width=8, fixed=True, prefill_chunk=CHUNK, num_tracks=1)
WEIGHTS = stock_model(Case("Qwen3Config"))
SYSTEM = tuple(range(3, 41))
SCHEDULES = (
    decoding("autoregressive"),
    decoding("synchronous", 3),
    decoding("asynchronous", 4, policy="chain"),
    decoding("asynchronous", 4, policy="branching"),
)
PARAMS = (
    SamplingParams(max_new_tokens=20, logprobs=True),
    SamplingParams(max_new_tokens=20, temperature=0.8, seed=5, repetition_penalty=1.2, frequency_penalty=0.3),
)


def table_model() -> TableModel:
    return TableModel(VOCAB, seed=7, max_length=256, numerics=Numerics(WIDTH, fixed=False, num_tracks=3))


def fixed_model() -> ModelRunner:
    return lean_model(WEIGHTS, FIXED)


@contextmanager
def engine(model: ModelRunner, *, max_num_seqs: int = 1, prefix_caching: bool = True) -> Iterator[Engine]:
    draft = lean_model(WEIGHTS, Numerics(width=16, fixed=False))
    drafters = {"draft": lambda: ModelDrafter(draft)}
    with engine_of(model, TableTokenizer(VOCAB), drafters, max_num_seqs=max_num_seqs) as (found, _):
        found.worker.prefix_caching = prefix_caching
        yield found


def ask(asked: Engine, prompt: Sequence[int], schedule: DecodingConfig = SCHEDULES[0], **changes: Any) -> Generation:
    params = changes.pop("params", SamplingParams(max_new_tokens=6))
    return asked.generate(tuple(prompt), params, decoding=schedule)


def cached(asked: Engine, prompt: Sequence[int]) -> int:
    return ask(asked, prompt).metrics.num_cached_tokens


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: f"{schedule.mode}-{schedule.policy}")
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
def test_the_turns_of_a_chat_have_the_bits_of_a_fresh_engine(schedule: DecodingConfig, params: SamplingParams) -> None:
    history, found = SYSTEM, []
    with engine(fixed_model()) as warm:
        for turn in range(4):
            found.append((history, ask(warm, history, schedule, params=params)))
            history += (*found[-1][1].token_ids, 50 + turn, 60 + turn)
            history = history[: 2 * CHUNK + 5] if turn == 2 else history  # the last goes on amid the others
    assert [answer.metrics.num_cached_tokens for _, answer in found] == [0, 32, 48, 32]
    for prompt, answer in found:
        with engine(fixed_model()) as fresh:
            alone = ask(fresh, prompt, params=params)
        assert (answer.token_ids, answer.logprobs) == (alone.token_ids, alone.logprobs)


def test_batches_have_the_bits_of_a_fresh_engine() -> None:
    prompts = [(*SYSTEM, *range(number, 2 * number)) for number in range(20, 30)]
    with engine(fixed_model(), max_num_seqs=3) as warm:
        answers = [answer for _ in range(2) for answer in warm.generate(prompts, PARAMS[0], decoding=SCHEDULES[1])]
        counts = warm.worker.counts
    assert sum(answer.metrics.num_cached_tokens for answer in answers) == counts.num_cached_tokens > 20 * CHUNK
    assert counts.num_prompt_tokens == 2 * sum(map(len, prompts))
    for prompt, answer, again in zip(prompts, answers[:10], answers[10:], strict=True):
        with engine(fixed_model()) as fresh:
            alone = ask(fresh, prompt, params=PARAMS[0])
        assert answer.logprobs == again.logprobs == alone.logprobs


def test_with_bucketed_passes_answers_are_taken_over_as_well() -> None:
    with engine(table_model()) as warm:
        first = ask(warm, SYSTEM)
        history = (*SYSTEM, *first.token_ids)
        again = ask(warm, (*history, 9))
        assert again.metrics.num_cached_tokens == len(history) - 1
        assert cached(warm, SYSTEM) == len(SYSTEM) - 1
    with engine(table_model()) as fresh:
        assert ask(fresh, (*history, 9)).token_ids == again.token_ids


def test_a_prompt_takes_the_cache_that_it_goes_on_with_and_else_the_least_recently_used() -> None:
    chats = [(*SYSTEM[:CHUNK], *range(10 * number, 10 * number + 40)) for number in range(1, 4)]
    with engine(fixed_model(), max_num_seqs=2) as warm:
        assert [cached(warm, chat) for chat in chats[:2]] == [0, 0]
        assert [cached(warm, (*chat, 5)) for chat in chats[:2]] == [48, 48]
        assert cached(warm, chats[2]) == CHUNK  # in the place of the first chat, whose beginning is its own
        assert [cached(warm, chat) for chat in chats] == [CHUNK, CHUNK, CHUNK]
        assert cached(warm, chats[2][:30]) == CHUNK


def test_a_prompt_that_was_not_taken_in_to_its_end_is_taken_over_as_far_as_it_came() -> None:
    with engine(fixed_model(), max_num_seqs=2) as warm:
        answers = [warm.submit(prompt) for prompt in ((5,), SYSTEM)]
        warm.scheduler.step()
        for answer in answers:
            answer.cancel()
        assert cached(warm, SYSTEM) == CHUNK


def test_nothing_is_taken_over_where_that_is_turned_off() -> None:
    with engine(fixed_model(), prefix_caching=False) as plain:
        assert [cached(plain, SYSTEM) for _ in range(2)] == [0, 0]
