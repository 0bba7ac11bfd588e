"""The synthetic drafter through the real workers: the target's own answer, accepted as often as asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from runtime.pair import PROMPT, VOCAB_SIZE, decoding, pair, params, reference, target_model

from amusd.commands.compare import run_comparison
from amusd.commands.contestants import Comparison
from amusd.config import HardwareConfig, RunConfig
from amusd.drafters.autoregressive import AutoregressiveDrafter
from amusd.drafters.base import Drafter
from amusd.drafters.synthetic import SyntheticDrafter
from amusd.engine import Engine
from amusd.settings import from_mapping
from amusd.tracing.metrics import total
from amusd.types import FinishReason, Mode
from amusd.workload import user_prompt

SPECULATIVE = [Mode.SYNCHRONOUS, Mode.ASYNCHRONOUS]
NUM_TOKENS = 60


def synthetic(accept: float) -> dict[str, Callable[[], Drafter]]:
    return {"synthetic": lambda: SyntheticDrafter(AutoregressiveDrafter(target_model()), accept, 0.0, VOCAB_SIZE)}


@pytest.mark.parametrize("mode", SPECULATIVE)
@pytest.mark.parametrize("accept", [0.0, 0.5, 0.8, 1.0])
def test_the_answer_is_that_of_plain_decoding(mode: Mode, accept: float) -> None:
    with pair(synthetic(accept)) as (engine, draft):
        for prompt in (PROMPT, PROMPT[:2], PROMPT):
            answer = engine.generate(prompt, params(NUM_TOKENS), decoding=decoding(mode))
            assert answer.token_ids == reference(NUM_TOKENS, prompt)[len(prompt) :]
            assert answer.finish_reason is FinishReason.LENGTH
            assert answer.metrics.num_verified > 0
            if accept in (0.0, 1.0):
                assert answer.metrics.num_accepted == accept * answer.metrics.num_verified
    assert draft.error is None


@pytest.mark.parametrize("mode", SPECULATIVE)
@pytest.mark.parametrize("accept", [0.5, 0.8])
def test_a_candidate_whose_predecessors_were_accepted_is_accepted_with_the_probability(
    mode: Mode, accept: float
) -> None:
    """Four standard deviations of a binomial variable either way: one false alarm in 16,000 runs."""
    with pair(synthetic(accept), pass_seconds=0.001) as (engine, _):
        answers = [engine.generate((first, 7), params(150), decoding=decoding(mode, 4)).metrics for first in range(8)]
    counts = total(answers)
    tried = (counts.num_drafts, *counts.accepted_by_position)
    for before, after in zip(tried[:1] if mode is Mode.ASYNCHRONOUS else tried[:3], tried[1:], strict=False):
        # In asynchronous mode a pass may have had no second candidate to judge.
        assert before > 50
        assert after / before == pytest.approx(accept, abs=4 * (accept * (1 - accept) / before) ** 0.5)


@pytest.mark.parametrize("mode", SPECULATIVE)
def test_a_stop_string_ends_the_answer_where_it_ends_plain_decoding(mode: Mode) -> None:
    with pair(synthetic(1.0)) as (engine, _):
        stop = engine.tokenizer.decode(reference(NUM_TOKENS)[len(PROMPT) + 10 :][:2])
        plain = engine.generate(PROMPT, params(NUM_TOKENS, (stop,)), decoding=decoding(Mode.AUTOREGRESSIVE))
        answer = engine.generate(PROMPT, params(NUM_TOKENS, (stop,)), decoding=decoding(mode))
    assert answer.finish_reason is plain.finish_reason is FinishReason.STOP
    assert answer.token_ids == plain.token_ids


def test_the_answer_is_decoded_in_advance_once_for_each_request_and_in_no_figure() -> None:
    """Sequences are numbered as they are decoded, so a gap is one that nobody asked for."""
    with pair(synthetic(1.0)) as (engine, _):

        def ask(mode: Mode, num_tokens: int = 20) -> int:
            answer = engine.generate(PROMPT, params(num_tokens), decoding=decoding(mode))
            assert (answer.metrics.num_passes < num_tokens) == (mode is not Mode.AUTOREGRESSIVE)
            return answer.sequence_id

        assert ask(Mode.SYNCHRONOUS) == 2
        assert ask(Mode.ASYNCHRONOUS) == 3
        assert ask(Mode.ASYNCHRONOUS, 30) == 5
        assert ask(Mode.AUTOREGRESSIVE) == 6
        assert ask(Mode.SYNCHRONOUS) == 7


def test_nothing_is_decoded_in_advance_for_a_draft_that_is_gone() -> None:
    with pair(synthetic(1.0)) as (engine, draft):
        draft.link.kill()
        first, second = (
            engine.generate(prompt, params(8), decoding=decoding(Mode.SYNCHRONOUS)) for prompt in (PROMPT, PROMPT[:2])
        )
    assert engine.draft_failure is not None
    assert first.token_ids == reference(8)[len(PROMPT) :]
    assert second.token_ids == reference(8, PROMPT[:2])[2:]
    assert (first.sequence_id, second.sequence_id) == (2, 3)


def test_a_comparison_decodes_each_prompt_in_advance_at_most_once() -> None:
    config = from_mapping(
        RunConfig,
        {
            "drafter": {"kind": "synthetic"},
            "compare": {"synchronous_lengths": [2, 4]},
            "sampling": {"max_new_tokens": 12},
        },
    )
    prompts = [user_prompt(text, number) for number, text in enumerate(("deaf", "bead", "cafe"))]
    comparison = Comparison.of(config)
    with pair(synthetic(0.8)) as (engine, _):
        run_comparison(engine, config, prompts, comparison, lambda *_: None)
    num_asked = (1 + len(prompts)) * len(comparison.contestants)
    last = max(answer.sequence_id for answers in comparison.answers for answer in answers)
    assert num_asked < last <= num_asked + len(prompts)
    plain = [answer.token_ids for answer in comparison.answers[0]]
    assert all([answer.token_ids for answer in answers] == plain for answers in comparison.answers)


def test_two_processes_without_a_checkpoint() -> None:
    hardware = HardwareConfig(synthetic="smollm2-135m-slice", devices=("cpu", "cpu"))
    # the target waits for candidates, however slow the machine is
    waiting = {"policy": "chain", "min_candidates": 2, "max_wait_passes": 10_000.0, "max_silence_seconds": 60.0}
    with Engine.launch(drafter="synthetic", hardware=hardware, max_model_len=128) as engine:
        plain, synchronous, asynchronous = (
            engine.generate("hello", params(96), decoding=decoding(mode, 4, **waiting))
            for mode in (Mode.AUTOREGRESSIVE, *SPECULATIVE)
        )
    assert engine.draft_failure is None
    assert plain.token_ids == synchronous.token_ids == asynchronous.token_ids
    assert 0 < synchronous.metrics.num_accepted < synchronous.metrics.num_verified
    assert asynchronous.metrics.num_accepted > 0
