"""The three modes over real workers: the same tokens in any timing, and the counts that go with them."""

from __future__ import annotations

import time

import pytest
from memory_link import MemoryTransport
from oracle import OracleDrafter, always_right, always_wrong
from runtime.pair import PROMPT, VOCAB_SIZE, WIDTH, decoding, oracle, pair, params, reference, target_model

from amusd.drafters.autoregressive import AutoregressiveDrafter
from amusd.drafters.synthetic import right_with_probability
from amusd.errors import ConfigError
from amusd.protocol.messages import Message
from amusd.protocol.wire import encode
from amusd.types import FinishReason, Mode

SPECULATIVE = [Mode.SYNCHRONOUS, Mode.ASYNCHRONOUS]
NUM_TOKENS = 60


@pytest.mark.parametrize("mode", SPECULATIVE)
@pytest.mark.parametrize("length", [1, 8])
def test_a_draft_equal_to_the_target_has_an_acceptance_rate_of_exactly_one(mode: Mode, length: int) -> None:
    """A cache that is one position off after any round would show here (vLLM #3951, mlxcel #994)."""
    with pair({"same": lambda: AutoregressiveDrafter(target_model())}) as (engine, _):
        for _round in range(2):
            answer = engine.generate(PROMPT, params(NUM_TOKENS), decoding=decoding(mode, length))
            metrics = answer.metrics
            assert metrics.as_dict()["acceptance_rate"] == 1.0
            assert metrics.draft is not None
            assert metrics.draft.num_rollbacks == 0
            if mode is Mode.SYNCHRONOUS:
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


@pytest.mark.parametrize("mode", SPECULATIVE)
def test_message_delays_change_nothing(mode: Mode) -> None:
    factory = oracle(NUM_TOKENS, right_with_probability(0.7, 1))
    with pair({"oracle": factory}, seed=1, max_delay_seconds=0.01, pass_seconds=0.01) as (engine, _):
        answer = engine.generate(PROMPT, params(NUM_TOKENS), decoding=decoding(mode, 6))
    assert answer.token_ids == reference(NUM_TOKENS)[len(PROMPT) :]
    assert 0 < answer.metrics.num_accepted < answer.metrics.num_verified
    assert answer.metrics.draft is not None
    assert answer.metrics.draft.num_rollbacks > 2


def test_plain_decoding_takes_one_pass_a_token_and_no_draft() -> None:
    with pair({"oracle": oracle(NUM_TOKENS, always_right())}) as (engine, _):
        answer = engine.generate(PROMPT, params(NUM_TOKENS), decoding=decoding(Mode.AUTOREGRESSIVE))
    assert answer.token_ids == reference(NUM_TOKENS)[len(PROMPT) :]
    assert answer.metrics.num_passes == NUM_TOKENS
    assert answer.metrics.draft is None
    assert answer.drafter is None


def test_a_drafter_that_the_draft_has_not_named_is_one_line_and_the_engine_goes_on() -> None:
    with pair({"oracle": oracle(20, always_right())}) as (engine, _):
        engine.drafters = ["oracle", "ngram"]  # as configured for this side alone
        for policy, there in (("chain", "oracle"), ("branching", "none")):
            schedule = decoding(Mode.ASYNCHRONOUS, policy=policy)
            with pytest.raises(ConfigError, match=f"drafter=ngram.*{there}"):
                engine.stream(PROMPT, params(5), decoding=schedule, drafter="ngram")
        assert engine.generate(PROMPT, params(5)).token_ids == reference(5)[len(PROMPT) :]


def test_the_context_limit_ends_an_answer_like_a_length() -> None:
    with pair({"oracle": oracle(375, always_right())}) as (engine, _):
        limit = engine.worker.model.max_length
        answer = engine.generate(PROMPT, params(10_000), decoding=decoding(Mode.ASYNCHRONOUS, 8))
    assert len(PROMPT) + len(answer.token_ids) == limit
    assert answer.finish_reason is FinishReason.LENGTH


def test_an_answer_can_be_left_early_and_the_next_is_whole() -> None:
    with pair({"oracle": oracle(NUM_TOKENS, always_right())}) as (engine, _):
        stream = engine.stream(PROMPT, params(NUM_TOKENS), decoding=decoding(Mode.ASYNCHRONOUS))
        first = [next(stream).token_id for _ in range(5)]
        stream.cancel()
        answer = engine.generate(PROMPT, params(NUM_TOKENS), decoding=decoding(Mode.ASYNCHRONOUS))
    assert answer.token_ids[:5] == tuple(first)
    assert answer.token_ids == reference(NUM_TOKENS)[len(PROMPT) :]


def test_the_draft_works_while_the_target_does() -> None:
    """Asynchronous: draft steps lie inside target passes. Synchronous: none does."""

    class PacedOracle(OracleDrafter):
        def propose(self, max_tokens: int) -> tuple[int, ...]:
            time.sleep(0.001)
            return super().propose(max_tokens)

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

    assert num_overlapping(Mode.ASYNCHRONOUS) > 10
    assert num_overlapping(Mode.SYNCHRONOUS) == 0


def test_every_token_is_handed_out_with_the_pass_that_committed_it() -> None:
    """Nothing is held back until the next pass: a reader sees the first token after the first pass."""
    with pair({"oracle": oracle(NUM_TOKENS, always_wrong())}) as (engine, _):
        stream = engine.stream(PROMPT, params(10), decoding=decoding(Mode.AUTOREGRESSIVE))
        for num_read in range(1, 11):
            next(stream)
            passes = [event for event in engine.worker.recorder.events if event.name == "target_pass"]
            assert len(passes) == num_read


class CountingLink:
    """Passes everything on, and keeps the size of every frame that leaves."""

    def __init__(self, inner: MemoryTransport) -> None:
        self.inner = inner
        self.sizes: list[int] = []

    def send(self, message: Message) -> None:
        self.sizes.append(len(encode(message, 0)))
        self.inner.send(message)

    def receive(self, timeout: float) -> Message | None:
        return self.inner.receive(timeout)

    def close(self) -> None:
        self.inner.close()


def test_messages_do_not_grow_with_the_text() -> None:
    """A round's message carries what is new, not the history."""
    links: list[CountingLink] = []

    def wrap(link: MemoryTransport) -> CountingLink:
        links.append(CountingLink(link))
        return links[-1]

    with pair({"oracle": oracle(300, always_right())}, wrap_target_link=wrap) as (engine, _):
        engine.generate(PROMPT, params(300), decoding=decoding(Mode.SYNCHRONOUS, 4))
    verdicts = links[0].sizes[2:-2]
    assert len(verdicts) > 40
    assert max(verdicts[-10:]) <= max(verdicts[:10]) + 8  # larger numbers take more bytes


@pytest.mark.parametrize("mode", SPECULATIVE)
def test_a_pass_is_never_wider_than_the_cap(mode: Mode) -> None:
    with pair({"oracle": oracle(NUM_TOKENS, always_right())}, pass_seconds=0.005) as (engine, _):
        engine.generate(PROMPT, params(NUM_TOKENS), decoding=decoding(mode, 20))
        widths = [
            1 + event.fields["num_candidates"] for event in engine.worker.recorder.events if event.name == "target_pass"
        ]
    assert max(widths) == WIDTH
