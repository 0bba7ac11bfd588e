"""Logits that are not numbers: of the target they end the answer in one line, of the draft they cost speed alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from runtime.pair import PROMPT, decoding, pair, plain_engine, reference, target_model

from amusd.config import SamplingParams
from amusd.drafters.model import ModelDrafter
from amusd.errors import NotFiniteError
from amusd.models.passes import ModelOutput, Rows

NUM_TOKENS = 30
NAN, INF = float("nan"), float("inf")
SAMPLINGS = {
    "greedy": {},
    "logprobs": {"logprobs": True},
    "temperature": {"temperature": 0.8},
    "filters": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.2, "logit_bias": {3: 1.0}},
    "ratio test": {"temperature": 0.8, "acceptance": "rejection"},
}
SCHEDULES = {
    "plain": decoding("autoregressive"),
    "synchronous": decoding("synchronous"),
    "chain": decoding("asynchronous", policy="waiting"),
}


def spoil(model: Any, is_spoiled: Callable[[int, int], bool], value: float) -> None:
    """Have `model` give one infinite or missing logit where `is_spoiled(token, position of the next)` says so."""
    run = model.run

    def spoilt(logits: torch.Tensor, token_ids: Any, positions: list[int]) -> None:
        for row, (token_id, position) in enumerate(zip(token_ids, positions, strict=True)):
            if is_spoiled(token_id, position):
                logits[row, :] = value if value == -INF else logits[row]
                logits[row, 7] = value

    def spoilt_run(batch: Sequence[Rows], steps: int = 1) -> list[ModelOutput]:
        starts = [rows.cache.length for rows in batch]
        outputs: list[ModelOutput] = run(batch, steps)
        for rows, start, output in zip(batch, starts, outputs, strict=True):
            positions = [start + 1]
            for parent in range(len(rows.token_ids) - 1) if rows.parents is None else rows.parents:
                positions.append(positions[parent] + 1)
            spoilt(output.logits, rows.token_ids, positions)
        return outputs

    model.run = spoilt_run


def params(sampling: str) -> SamplingParams:
    return SamplingParams(max_new_tokens=NUM_TOKENS, **SAMPLINGS[sampling])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sampling", "schedule", "value"),
    list(zip(SAMPLINGS, 2 * list(SCHEDULES), (NAN, INF, -INF, INF, -INF, NAN), strict=True)),
)
def test_logits_of_the_target_that_are_no_numbers_end_the_answer_with_their_position(
    sampling: str, schedule: str, value: float
) -> None:
    with pair({"same": lambda: ModelDrafter(target_model())}) as (engine, _):
        whole = engine.generate(PROMPT, params(sampling), decoding=SCHEDULES["plain"])
        spoil(engine.worker.model, lambda _, position: position >= len(PROMPT) + 12, value)
        stream = engine.stream(PROMPT, params(sampling), decoding=SCHEDULES[schedule])
        with pytest.raises(NotFiniteError) as caught:
            list(stream)
        assert str(caught.value).startswith(f"target: the largest logit is {value} at position {len(PROMPT) + 12}, ")
        assert "\n" not in str(caught.value)
        assert len(stream.token_ids) == 12
        if sampling != "ratio test":
            assert stream.token_ids == whole.token_ids[:12]
        short = SamplingParams(max_new_tokens=5)
        again = engine.generate(PROMPT, short)
        assert again.token_ids == reference(5)[len(PROMPT) :]
        assert again.metrics.num_cached_tokens == 0  # what the cache held may be no numbers


def test_logits_of_one_sequence_that_are_no_numbers_end_its_answer_alone() -> None:
    """A pass that is made again writes its logits where those of all sequences lay."""
    with plain_engine() as engine:
        expected = engine.generate(PROMPT, params("ratio test"))
        model: Any = engine.worker.model
        spoil(model, lambda _, position: position >= 60, NAN)
        run, last = model.run, list[ModelOutput]()

        def replay(batch: Sequence[Rows]) -> list[ModelOutput]:
            for output in last:
                output.logits.zero_()
            last[:] = run(batch)
            return [*last]

        model.run = replay
        broken, healthy = (engine.submit(prompt, params("ratio test")) for prompt in (50 * (9,), PROMPT))
        assert healthy.result().token_ids == expected.token_ids
        with pytest.raises(NotFiniteError):
            broken.result()
        assert not engine.worker.sequences
        assert engine.generate(PROMPT, params("ratio test")).token_ids == expected.token_ids


@pytest.mark.parametrize("sampling", ["greedy", "filters", "ratio test"])
def test_logits_of_a_draft_that_are_no_numbers_cost_speed_alone_and_are_said_once(
    sampling: str, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> ModelDrafter:
        model = target_model()
        spoil(model, lambda _, position: position >= len(PROMPT) + 6, NAN)
        return ModelDrafter(model)

    with caplog.at_level(logging.WARNING), pair({"broken": broken}) as (engine, _):
        plain = engine.generate(PROMPT, params(sampling), decoding=SCHEDULES["plain"])
        for _ in range(2):
            answer = engine.generate(PROMPT, params(sampling), decoding=SCHEDULES["chain"])
            assert len(answer.token_ids) == NUM_TOKENS
            if sampling != "ratio test":
                assert answer.token_ids == plain.token_ids
            assert answer.metrics.draft is not None
        assert engine.draft.losses == []
    said = [record.getMessage() for record in caplog.records if "draft" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("draft: the largest logit is nan, which costs speed alone: its weights are damaged")
