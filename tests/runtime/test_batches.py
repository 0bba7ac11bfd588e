"""Several answers at a time: each is what it would be alone, and none holds up the others."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
from oracle import OracleDrafter, always_wrong
from passes import forward, prefilled
from runtime.pair import (
    PROMPT,
    VOCAB_SIZE,
    await_restarts,
    decoding,
    pair,
    params,
    reference,
    restarting_pair,
    target_model,
)
from runtime.table_tree import TableTreeDrafter, spread
from runtime.test_sampled import DRAFTERS, FILTERS

from amusd.answer import Answer, Generation
from amusd.config import DecodingConfig, SamplingParams
from amusd.drafters.base import Drafter
from amusd.drafters.model import ModelDrafter
from amusd.drafters.ngram import NgramCache, NgramDrafter
from amusd.drafters.synthetic import right_with_probability
from amusd.engine import Engine
from amusd.errors import PeerProtocolError
from amusd.tracing.events import Event, TargetPass

EOS = 7
CHUNK = 16
PLAIN = decoding("autoregressive")
START = (3,)
"""A prompt that needs no prefill, so that requests admitted together have their passes together."""
CHAINS: dict[str, Callable[[], Drafter]] = {
    **DRAFTERS,
    "lookup first": lambda: ModelDrafter(target_model(), NgramCache(2)),
    "ngram": lambda: NgramDrafter(1),
}
TREES: dict[str, Callable[[], Drafter]] = {"same": lambda: TableTreeDrafter(places=spread(3))}
SCHEDULES = (
    PLAIN,
    decoding("synchronous", 3),
    *(decoding("asynchronous", 4, policy=policy) for policy in ("chain", "windowed", "auto", "branching")),
)


@dataclass(frozen=True)
class Asked:
    """One request."""

    prompt: tuple[int, ...]
    params: SamplingParams
    decoding: DecodingConfig
    drafter: str | None
    cancelled_after: int | None
    """Tokens; None: it is read to its end."""

    def begin(self, engine: Engine) -> Answer:
        return engine.submit(self.prompt, self.params, decoding=self.decoding, drafter=self.drafter)


def asked(draw: random.Random, number: int) -> Asked:
    """Any request. Each tenth is cancelled in mid-answer."""
    num_tokens = draw.randint(2, 60)
    temperature = draw.choice((0.0, 0.0, 0.3, 0.7, 1.0, 1.5))
    rule = draw.choice(("auto", "greedy", "rejection")) if temperature else "auto"
    schedule = draw.choice(SCHEDULES)
    if rule == "rejection" and schedule.policy == "branching":
        schedule = SCHEDULES[2]
    filters = draw.choice(FILTERS)
    drafter = None if schedule.mode == "autoregressive" else draw.choice(tuple(CHAINS))
    if schedule.policy == "branching" and schedule.mode == "asynchronous":
        drafter = "same"
    return Asked(
        prompt=tuple(draw.randrange(VOCAB_SIZE) for _ in range(draw.choice((1, 5, 20, 50)))),
        params=SamplingParams(
            temperature=0.0 if rule == "greedy" else temperature,
            acceptance="auto" if rule == "greedy" else rule,
            seed=draw.randrange(1000),
            max_new_tokens=num_tokens,
            stop=draw.choice(((), (), ("b",), ("ca", "d"))),
            ignore_eos=draw.random() < 0.5,
            logprobs=draw.random() < 0.3,
            top_logprobs=draw.choice((0, 0, 3)),
            **(filters if temperature and rule != "greedy" else {}),
        ),
        decoding=schedule,
        drafter=drafter,
        cancelled_after=draw.randint(1, num_tokens) if number % 10 == 9 else None,
    )


def as_seen(generation: Generation) -> tuple[Any, ...]:
    """The parts of a finished answer that its reader sees."""
    scores = generation.logprobs, generation.top_logprobs
    return generation.token_ids, generation.text, generation.finish_reason, scores


def logprobs_alone(prompt: tuple[int, ...], token_ids: tuple[int, ...]) -> list[float]:
    """Log-probabilities of an answer's tokens, computed directly by the model."""
    model = target_model()
    cache = prefilled(model, prompt[:-1], len(prompt) + len(token_ids))
    tokens = (prompt[-1], *token_ids)
    rows = [forward(model, [token], cache).logits[0] for token in tokens[:-1]]
    return [float(row.log_softmax(-1)[token]) for row, token in zip(rows, token_ids, strict=True)]


def check(engine: Engine, one: Asked, answer: Answer, *, is_whole: bool) -> None:
    """Check an answer against plain decoding of this request alone; under the ratio test any possible answer passes."""
    if one.params.rule != "rejection":
        alone = engine.generate(one.prompt, one.params, decoding=PLAIN)
        assert answer.token_ids == alone.token_ids[: len(answer.token_ids)], one
        assert not is_whole or as_seen(answer.generation) == as_seen(alone), one
    elif is_whole:
        generation = answer.generation
        assert generation.finish_reason in ("length", "stop", "eos")
        if generation.finish_reason == "length":
            assert len(generation.token_ids) == one.params.max_new_tokens
        if one.params.logprobs:
            expected = logprobs_alone(one.prompt, generation.token_ids)
            assert generation.logprobs == pytest.approx(expected, abs=1e-6), one


def events_of(engine: Engine, *names: str) -> list[Event]:
    return [event for event in engine.worker.recorder.events if event.name in names]


def steps_of(engine: Engine) -> list[tuple[str, list[int]]]:
    """The computations of the target in order: chunks of a prompt and passes, each with its sequences."""
    found: dict[tuple[int, str], list[int]] = {}
    for event in events_of(engine, "target_prefill", "target_pass"):
        found.setdefault((event.start_ns, event.name), []).append(event.sequence_id)
    return [(name, sequences) for (_, name), sequences in sorted(found.items())]


def passes_of(engine: Engine) -> list[list[int]]:
    return [sequences for name, sequences in steps_of(engine) if name == "target_pass"]


# Each is what it would be alone


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_sixty_four_mixed_requests_are_each_their_own_plain_run(seed: int) -> None:
    """Answers are read in any order, requests come and are cancelled meanwhile, and the draft is lost twice."""
    draw = random.Random(f"mixed {seed}")
    waiting = [asked(draw, number) for number in range(64)]
    waiting.reverse()
    begun: list[tuple[Asked, Answer]] = []
    unread: list[tuple[Asked, Answer]] = []
    closed: set[Answer] = set()
    num_killed = 0
    with restarting_pair(
        {**CHAINS, **TREES}, max_num_seqs=4, eos_token_id=EOS, pass_seconds=0.001, prefill_chunk=CHUNK
    ) as (engine, drafts):
        while waiting or unread:
            while waiting and (len(unread) < 2 or (len(unread) < 12 and draw.random() < 0.2)):
                one = waiting.pop()
                begun.append((one, one.begin(engine)))
                unread.append(begun[-1])
            if num_killed < 2 and len(begun) >= 20 * (num_killed + 1):
                await_restarts(engine, num_killed)
                drafts.drop()
                num_killed += 1
            one, answer = unread[min(draw.randrange(len(unread)), draw.randrange(len(unread)))]
            token = next(answer, None)
            is_cancelled = one.cancelled_after is not None and len(answer.token_ids) >= one.cancelled_after
            if is_cancelled:
                answer.cancel()
                closed.add(answer)
            if token is None or is_cancelled:
                unread.remove((one, answer))
        await_restarts(engine, 2)
        assert len(engine.draft.losses) == 2
        assert engine.draft.failure is None
        assert not engine.worker.sequences
        assert max(len(sequences) for sequences in passes_of(engine)) == 4
        accepted = sum(event.fields["num_accepted"] for event in events_of(engine, "target_pass"))
        assert accepted > 50
        for one, answer in begun:
            check(engine, one, answer, is_whole=answer not in closed)
    assert [incarnation.code for incarnation in drafts.incarnations] == [0] * 3


@lru_cache
def text_after(prompt: tuple[int, ...]) -> tuple[int, ...]:
    return reference(NUM_SCHEDULED + 20, prompt)


NUM_SCHEDULED = 120


class PromptedOracle(OracleDrafter):
    """An oracle with a schedule of its own for each of eight prompts."""

    def __init__(self) -> None:
        super().__init__((), always_wrong(), VOCAB_SIZE)

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        super().open(token_ids, capacity, fan_out)
        prompt = tuple(token_ids[: len(PROMPT)])
        self._reference, self._schedule = text_after(prompt), right_with_probability(0.7, prompt[-1])


EIGHT_PROMPTS = [(*PROMPT[:-1], number) for number in range(8)]


# None holds up the others


def test_the_slot_of_a_cancelled_answer_is_free_at_the_next_step() -> None:
    with pair({}, max_num_seqs=2) as (engine, _):
        cancelled, other, waiting = (engine.submit(START, params(20)) for _ in range(3))
        for _ in range(3):
            next(cancelled)
        cancelled.cancel()
        assert next(waiting).token_id == reference(1, START)[1]
        assert passes_of(engine) == [[1, 2]] * 3 + [[2, 3]]
        assert other.result().token_ids == waiting.result().token_ids == reference(20, START)[1:]


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_a_prompt_that_comes_in_lets_the_others_have_a_pass_between_two_chunks(num_chunks: int) -> None:
    prompt = tuple(number % VOCAB_SIZE for number in range(num_chunks * CHUNK + 1))
    with pair({}, max_num_seqs=3, prefill_chunk=CHUNK) as (engine, _):
        others = [engine.submit(START, params(30)) for _ in range(2)]
        next(others[0])
        num_before = len(steps_of(engine))
        long = engine.submit(prompt, params(5))
        next(long)
        expected = [("target_prefill", [3]), ("target_pass", [1, 2])] * num_chunks
        expected[-1] = ("target_pass", [1, 2, 3])
        assert steps_of(engine)[num_before:] == expected
        assert long.result().token_ids == reference(5, prompt)[len(prompt) :]
        assert [other.result().token_ids for other in others] == [reference(30, START)[1:]] * 2


def test_prompts_that_come_together_are_taken_in_together_as_far_as_a_chunk_goes() -> None:
    prompts = [tuple(number % VOCAB_SIZE for number in range(length + 1)) for length in (5, CHUNK - 5, 4, CHUNK, 3)]
    with pair({}, max_num_seqs=6, prefill_chunk=CHUNK) as (engine, _):
        other = engine.submit(START, params(30))
        next(other)
        num_before = len(steps_of(engine))
        coming = [engine.submit(prompt, params(5)) for prompt in prompts]
        next(coming[-1])
        in_order = [[2, 3], [4], [5], [6]]
        expected = []
        for number, taken_in in enumerate(in_order, start=1):
            expected += [("target_prefill", [each]) for each in taken_in]
            expected.append(("target_pass", [1, *(each for some in in_order[:number] for each in some)]))
        assert steps_of(engine)[num_before:] == expected
        for prompt, answer in zip(prompts, coming, strict=True):
            assert answer.result().token_ids == reference(5, prompt)[len(prompt) :]


def test_a_prompt_that_comes_in_alone_is_taken_in_at_once() -> None:
    prompt = tuple(number % VOCAB_SIZE for number in range(3 * CHUNK + 1))
    with pair({}, max_num_seqs=3, prefill_chunk=CHUNK) as (engine, _):
        next(engine.submit(prompt, params(5)))
        assert steps_of(engine) == [("target_prefill", [1]), ("target_pass", [1])]


def test_a_block_is_waited_for_whoever_else_is_ready() -> None:
    class Slow(PromptedOracle):
        def propose(self, path: Sequence[int], room: int) -> tuple[int, ...]:
            time.sleep(0.02)
            return super().propose(path, room)

    schedule = decoding("synchronous", 4, max_silence_seconds=20.0)
    with pair({"slow": Slow}, max_num_seqs=3) as (engine, _):
        others = [engine.submit(START, params(30), decoding=PLAIN) for _ in range(2)]
        waiter = engine.submit(EIGHT_PROMPTS[0], params(20), decoding=schedule)
        answer = waiter.result()
        assert answer.token_ids == text_after(EIGHT_PROMPTS[0])[len(PROMPT) :][:20]
        passes = [event for event in events_of(engine, "target_pass") if isinstance(event, TargetPass)]
        sizes = [event.num_candidates for event in passes if event.sequence_id == answer.sequence_id]
        assert sizes[:4] == [4, 4, 4, 4]
        for other in others:
            assert other.result().token_ids == reference(30, START)[1:]


def test_one_that_its_draft_cannot_take_has_another_one_wait_for_it_once() -> None:
    """Blocks are waited for in lock step, but not in each pass for one of which the draft says nothing.

    A slow machine may keep the draft for as long, but not in most passes.
    """

    class Short(PromptedOracle):
        def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
            if capacity > 200:
                raise PeerProtocolError("too long")
            super().open(token_ids, capacity, fan_out)

    with pair({"short": Short}, max_num_seqs=2) as (engine, _):
        schedule = decoding("synchronous", 4, max_silence_seconds=0.5)
        long = engine.submit(EIGHT_PROMPTS[0], params(300), decoding=schedule)
        served = engine.generate(EIGHT_PROMPTS[1], params(NUM_SCHEDULED), decoding=schedule)
        assert served.metrics.num_accepted > 30
        waits = [event for event in events_of(engine, "target_wait") if event.sequence_id == 1]
        assert sum(event.duration_ns > 0.25e9 for event in waits) < served.metrics.num_passes / 2
        assert long.result().token_ids == reference(300, EIGHT_PROMPTS[0])[len(PROMPT) :]


def test_more_requests_than_slots_are_admitted_in_the_order_in_which_they_were_submitted() -> None:
    """The order of reading does not matter, and a cancelled sequence is left out."""
    with pair({}, max_num_seqs=2) as (engine, _):
        answers = [engine.submit(START, params(10 + number)) for number in range(6)]
        answers[3].cancel()
        kept = [answer for number, answer in enumerate(answers) if number != 3]
        for answer in reversed(kept):
            answer.result()
        assert [answer.generation.sequence_id for answer in kept] == [1, 2, 3, 4, 5]
        lengths = [10, 11, 12, 14, 15]
        assert [answer.token_ids for answer in kept] == [reference(number, START)[1:] for number in lengths]
        passes = passes_of(engine)
        firsts = [next(n for n, sequences in enumerate(passes) if number in sequences) for number in range(1, 6)]
        assert firsts == [0, 0, 10, 11, 22]


def test_an_admission_that_fails_costs_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair({}, max_num_seqs=2) as (engine, _):

        def refuse(sequence: object) -> None:
            raise OSError("no")

        for _ in range(3):
            with monkeypatch.context() as broken:
                broken.setattr(engine.worker.client, "open", refuse)
                with pytest.raises(OSError, match="no"):
                    engine.generate(START, params(10))
        answers = [engine.submit(START, params(10)) for _ in range(2)]
        assert [answer.result().token_ids for answer in answers] == [reference(10, START)[1:]] * 2
        assert [len(sequences) for sequences in passes_of(engine)] == [2] * 10
