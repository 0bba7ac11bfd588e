"""The three modes over real workers: the same tokens in any timing, and the counts that go with them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from oracle import OracleDrafter, always_right, always_wrong
from runtime.pair import (
    PROMPT,
    TIMEOUT_SECONDS,
    VOCAB_SIZE,
    WAITING,
    decoding,
    on_pass,
    oracle,
    pair,
    params,
    reference,
    target_model,
)

from amusd.drafters.model import ModelDrafter
from amusd.drafters.synthetic import right_with_probability
from amusd.types import Mode

SPECULATIVE = ["synchronous", "asynchronous"]
NUM_TOKENS = 60


@pytest.mark.parametrize("mode", SPECULATIVE)
@pytest.mark.parametrize("length", [1, 8])
def test_a_draft_equal_to_the_target_has_an_acceptance_rate_of_exactly_one(mode: Mode, length: int) -> None:
    """A cache that is one position off after any round would show here (vLLM #3951, mlxcel #994)."""
    with pair({"same": lambda: ModelDrafter(target_model())}) as (engine, _):
        for _round in range(2):
            answer = engine.generate(PROMPT, params(NUM_TOKENS), decoding=decoding(mode, length, policy=WAITING))
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
        answer = engine.generate(PROMPT, params(NUM_TOKENS), decoding=decoding(mode, length, policy=WAITING))
    assert answer.token_ids == reference(NUM_TOKENS)[len(PROMPT) :]
    assert answer.metrics.num_verified > 0
    assert answer.metrics.num_accepted == 0
    assert answer.metrics.num_passes == NUM_TOKENS
    assert answer.metrics.draft is not None
    assert answer.metrics.draft.num_rollbacks > 5


def test_an_asynchronous_draft_works_while_the_target_does() -> None:
    """The first pass lasts until the draft has made a step, which it makes in a pass alone."""
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
