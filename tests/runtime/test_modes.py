"""The three modes over real workers: the same tokens in any timing, and the counts that go with them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
from oracle import OracleDrafter, always_right, always_wrong
from runtime.pair import (
    PROMPT,
    TIMEOUT_SECONDS,
    VOCAB_SIZE,
    decoding,
    on_pass,
    oracle,
    pair,
    params,
    reference,
    target_model,
)
from table_model import TableModel, TableTokenizer

from amusd.drafters.base import Drafter
from amusd.drafters.cascade import CascadeDrafter
from amusd.drafters.model import ModelDrafter
from amusd.drafters.synthetic import right_with_probability
from amusd.models.numerics import Numerics
from amusd.types import Mode

SPECULATIVE = ["synchronous", "asynchronous"]
NUM_TOKENS = 60


@pytest.mark.parametrize("mode", SPECULATIVE)
@pytest.mark.parametrize("length", [1, 8])
def test_a_draft_equal_to_the_target_has_an_acceptance_rate_of_exactly_one(mode: Mode, length: int) -> None:
    """A cache that is one position off after any round would show here (vLLM #3951, mlxcel #994)."""
    with pair({"same": lambda: ModelDrafter(target_model())}) as (engine, _):
        for _round in range(2):
            answer = engine.generate(PROMPT, params(NUM_TOKENS), decoding=decoding(mode, length, policy="waiting"))
            metrics = answer.metrics
            assert metrics.as_dict()["acceptance_rate"] == 1.0
            assert metrics.draft is not None
            assert metrics.draft.num_rollbacks == 0
            if mode == "synchronous":
                assert metrics.num_passes == -(-NUM_TOKENS // (length + 1))
            assert answer.token_ids == reference(NUM_TOKENS)[len(PROMPT) :]


@pytest.mark.parametrize("mode", SPECULATIVE)
@pytest.mark.parametrize("length", [1, 8])
def test_a_draft_that_is_always_wrong_costs_no_token(mode: Mode, length: int) -> None:
    with pair({"oracle": oracle(NUM_TOKENS, always_wrong())}) as (engine, _):
        answer = engine.generate(PROMPT, params(NUM_TOKENS), decoding=decoding(mode, length, policy="waiting"))
    assert answer.token_ids == reference(NUM_TOKENS)[len(PROMPT) :]
    assert answer.metrics.num_verified > 0
    assert answer.metrics.num_accepted == 0
    assert answer.metrics.num_passes == NUM_TOKENS
    assert answer.metrics.draft is not None
    assert answer.metrics.draft.num_rollbacks > 5


def test_an_asynchronous_draft_works_while_the_target_does() -> None:
    """The first pass lasts until the draft has made a step; the draft makes its step only during a pass."""
    passing, has_stepped = threading.Event(), threading.Event()

    class InPass(OracleDrafter):
        def propose(self, path: Sequence[int], room: int) -> tuple[int, ...]:
            assert passing.wait(TIMEOUT_SECONDS)
            has_stepped.set()
            return super().propose(path, room)

    def begin(number: int) -> None:
        passing.set()
        assert has_stepped.wait(TIMEOUT_SECONDS)

    known = reference(NUM_TOKENS + 20)
    with pair({"oracle": lambda: InPass(known, always_right(), VOCAB_SIZE)}) as (engine, _):
        on_pass(engine, begin)
        engine.generate(PROMPT, params(NUM_TOKENS), decoding=decoding("asynchronous", policy="chain"))


def test_a_synchronous_draft_never_works_while_the_target_does() -> None:
    with pair({"oracle": oracle(NUM_TOKENS, right_with_probability(0.8, 3))}) as (engine, draft):
        engine.generate(PROMPT, params(NUM_TOKENS), decoding=decoding("synchronous", 8))
        passes = [event for event in engine.worker.recorder.events if event.name == "target_pass"]
        steps = [event for event in draft.recorder.events if event.name == "draft_step"]
    assert min(len(passes), len(steps)) > 5
    assert not any(one.start_ns <= step.start_ns and step.end_ns <= one.end_ns for one in passes for step in steps)


def test_every_token_is_handed_out_with_the_pass_that_committed_it() -> None:
    """Nothing is held back until the next pass: a reader sees the first token after the first pass."""
    with pair({"oracle": oracle(NUM_TOKENS, always_wrong())}) as (engine, _):
        stream = engine.stream(PROMPT, params(10), decoding=decoding("autoregressive"))
        for num_read in range(1, 11):
            next(stream)
            passes = [event for event in engine.worker.recorder.events if event.name == "target_pass"]
            assert len(passes) == num_read


# Where answers end: each stop position with each length cap

BLOCK = 4
CAPS = range(1, BLOCK + 3)
"""`max_new_tokens` from 1 to K + 2."""
ANSWER = reference(BLOCK + 20)[len(PROMPT) :]
SCHEDULES = {"right": always_right(), "partly": right_with_probability(0.6, 5)}
CASES = [
    ("autoregressive", "right"),
    ("synchronous", "right"),
    ("asynchronous", "right"),
    ("synchronous", "partly"),
    ("asynchronous", "partly"),
]


def first_index(token_id: int) -> int:
    return ANSWER.index(token_id)


@pytest.mark.parametrize(("mode", "schedule"), CASES)
def test_end_of_sequence_against_every_length_cap(mode: Mode, schedule: str) -> None:
    """EOS at each place of the block, the cap at each place: nothing after the first of the two, the reason right."""
    for eos_index in range(BLOCK + 3):
        eos = ANSWER[eos_index]
        with pair({"oracle": oracle(30, SCHEDULES[schedule])}, eos_token_id=eos) as (engine, _):
            for cap in CAPS:
                answer = engine.generate(PROMPT, params(cap), decoding=decoding(mode, BLOCK))
                end = min(first_index(eos) + 1, cap)
                assert answer.token_ids == ANSWER[:end]
                # At the same token end-of-sequence wins over the length.
                expected = "eos" if first_index(eos) + 1 <= cap else "length"
                assert answer.finish_reason is expected
                assert answer.metrics.num_tokens == end
                assert answer.metrics.num_prompt_tokens == len(PROMPT)


@pytest.mark.parametrize(("mode", "schedule"), CASES)
def test_stop_strings_against_every_length_cap(mode: Mode, schedule: str) -> None:
    """Stop strings of one to three tokens, so that they lie across tokens and blocks, at each place."""
    text = TableTokenizer(VOCAB_SIZE).decode(ANSWER)
    with pair({"oracle": oracle(30, SCHEDULES[schedule])}) as (engine, _):
        for length in (1, 2, 3):
            for start in range(BLOCK + 2):
                stop = text[start : start + length]
                end = text.index(stop) + length
                for cap in (1, end - 1, end, end + 1):
                    if cap < 1:
                        continue
                    answer = engine.generate(PROMPT, params(cap, (stop,)), decoding=decoding(mode, BLOCK))
                    stopped = end <= cap
                    assert answer.token_ids == ANSWER[: min(end, cap)]
                    assert answer.finish_reason is ("stop" if stopped else "length")
                    assert answer.text == (text[: end - length] if stopped else text[:cap])
                    assert answer.metrics.num_tokens == min(end, cap)


@pytest.mark.parametrize("mode", ["autoregressive", "synchronous", "asynchronous"])
def test_streamed_text_is_the_answers_text(mode: Mode) -> None:
    text = TableTokenizer(VOCAB_SIZE).decode(ANSWER)
    with pair({"oracle": oracle(30, SCHEDULES["partly"])}) as (engine, _):
        for stop in ((), (text[6:9],), (text[5:7], text[4:6]), ("nowhere to be found",)):
            stream = engine.stream(PROMPT, params(12, stop), decoding=decoding(mode, BLOCK))
            tokens = list(stream)
            assert "".join(token.text for token in tokens) == stream.generation.text
            assert tuple(token.token_id for token in tokens) == stream.generation.token_ids
            assert not any(string in stream.generation.text for string in stop)


# A draft with fewer positions than the sequence drafts up to its last one

POSITIONS = 30
SHORT = TableModel(
    VOCAB_SIZE,
    seed=7,
    max_length=POSITIONS,
    numerics=Numerics(POSITIONS, fixed=False, has_borders=False, prefill_chunk=POSITIONS, num_tracks=3),
)
WAITS = {
    "synchronous": decoding("synchronous", 4),
    "chain": decoding("asynchronous", policy="waiting"),
    "windowed": decoding("asynchronous", policy="windowed"),
}
MAKERS: dict[str, Callable[[], Drafter]] = {
    "model": lambda: ModelDrafter(SHORT),
    "cascade": lambda: CascadeDrafter(SHORT, ModelDrafter(SHORT)),
}


@pytest.mark.parametrize(
    ("schedule", "drafter", "prompt"),
    [
        ("synchronous", "model", PROMPT),
        ("chain", "cascade", PROMPT),
        ("windowed", "model", PROMPT),
        ("synchronous", "cascade", reference(POSITIONS)),
        ("chain", "model", reference(POSITIONS)),
    ],
)
def test_the_answer_is_the_targets_and_is_drafted_as_far_as_the_draft_reaches(
    schedule: str, drafter: str, prompt: tuple[int, ...]
) -> None:
    with pair({drafter: MAKERS[drafter]}) as (engine, _):
        answer = engine.generate(prompt, params(60), decoding=WAITS[schedule])
    assert answer.token_ids == reference(60, prompt)[len(prompt) :]
    num_drafted = answer.metrics.num_accepted
    assert num_drafted <= max(0, POSITIONS - len(prompt))
    assert num_drafted >= (10 if prompt is PROMPT else 0)
    waits = [event.duration_ns for event in engine.worker.recorder.events if event.name == "target_wait"]
    assert sum(waits) < 15e9, "the target waits for what cannot come"
