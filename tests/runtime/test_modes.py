"""The three modes over real workers: the same tokens in any timing, and the counts that go with them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from oracle import OracleDrafter, always_wrong
from runtime.pair import PROMPT, VOCAB_SIZE, decoding, oracle, pair, params, reference, target_model

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
            answer = engine.generate(PROMPT, params(NUM_TOKENS), decoding=decoding(mode, length))
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
        answer = engine.generate(PROMPT, params(NUM_TOKENS), decoding=decoding(mode, length))
    assert answer.token_ids == reference(NUM_TOKENS)[len(PROMPT) :]
    assert answer.metrics.num_verified > 0
    assert answer.metrics.num_accepted == 0
    assert answer.metrics.num_passes == NUM_TOKENS
    assert answer.metrics.draft is not None
    assert answer.metrics.draft.num_rollbacks > 5


def test_the_draft_works_while_the_target_does() -> None:
    """Asynchronous: draft steps lie inside target passes. Synchronous: none does."""

    class PacedOracle(OracleDrafter):
        def propose(self, path: Sequence[int], room: int) -> tuple[int, ...]:
            time.sleep(0.001)
            return super().propose(path, room)

    known = reference(NUM_TOKENS + 20)

    def num_overlapping(mode: Mode) -> int:
        factory = lambda: PacedOracle(known, right_with_probability(0.8, 3), VOCAB_SIZE)  # noqa: E731
        with pair({"oracle": factory}, pass_seconds=0.005) as (engine, draft):
            engine.generate(PROMPT, params(NUM_TOKENS), decoding=decoding(mode, 8))
            passes = [e for e in engine.worker.recorder.events if e.name == "target_pass"]
            steps = [e for e in draft.recorder.events if e.name == "draft_step"]
        assert passes
        assert steps
        return sum(any(p.start_ns <= s.start_ns and s.end_ns <= p.end_ns for p in passes) for s in steps)

    assert num_overlapping("asynchronous") > 10
    assert num_overlapping("synchronous") == 0


def test_every_token_is_handed_out_with_the_pass_that_committed_it() -> None:
    """Nothing is held back until the next pass: a reader sees the first token after the first pass."""
    with pair({"oracle": oracle(NUM_TOKENS, always_wrong())}) as (engine, _):
        stream = engine.stream(PROMPT, params(10), decoding=decoding("autoregressive"))
        for num_read in range(1, 11):
            next(stream)
            passes = [event for event in engine.worker.recorder.events if event.name == "target_pass"]
            assert len(passes) == num_read
