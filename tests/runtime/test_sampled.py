"""Sampling by both workers: a draft equal to the target, logprobs, the ratio test (all modes: `test_batches.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
from passes import forward, prefilled
from runtime.pair import PROMPT, VOCAB_SIZE, decoding, pair, target_model
from table_model import TableModel

from amusd.config import SamplingParams
from amusd.drafters.base import Drafter
from amusd.drafters.cascade import CascadeDrafter
from amusd.drafters.model import ModelDrafter
from amusd.drafters.ngram import NgramCache
from amusd.types import Mode

SPECULATIVE = ["synchronous", "asynchronous"]
NUM_TOKENS = 40
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 5},
    {"top_p": 0.9},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.05},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": ((3, 1.5), (7, -4.0))},
    {"frequency_penalty": 0.6, "presence_penalty": -0.4},
]
STRANGER = TableModel(VOCAB_SIZE, seed=8, max_length=400)
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "cascade": lambda: CascadeDrafter(target_model(), ModelDrafter(STRANGER, NgramCache(2))),
    "same": lambda: ModelDrafter(target_model()),
    "stranger": lambda: ModelDrafter(STRANGER),
}


def params(temperature: float, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_new_tokens=NUM_TOKENS, **{"seed": 11, **changes})


@pytest.mark.parametrize(("acceptance", "least"), [("matching", 1.0), ("rejection", 0.99)])
@pytest.mark.parametrize("filters", FILTERS, ids=lambda filters: ",".join(filters) or "none")
def test_a_draft_equal_to_the_target_is_always_accepted(filters: dict[str, Any], acceptance: str, least: float) -> None:
    """The draft draws with the same noise at the same positions, and penalties count the same tokens.

    In the ratio test p / q is 1 for every token, but rows are rounded to float32.
    """
    with pair({name: DRAFTERS[name] for name in ("same", "cascade")}) as (engine, _):
        for mode, drafter, length in (("synchronous", "same", 4), ("asynchronous", "cascade", 8)):
            wanted = params(1.0, acceptance=acceptance, **filters)
            schedule = decoding(mode, length, policy="waiting")
            answer = engine.generate(PROMPT, wanted, decoding=schedule, drafter=drafter)
            assert len(answer.token_ids) == NUM_TOKENS
            assert answer.metrics.num_verified > 0
            assert answer.metrics.num_accepted >= least * answer.metrics.num_verified


@pytest.mark.parametrize("mode", get_args(Mode))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_scoring_the_answer_again(mode: Mode, temperature: float) -> None:
    with pair({"stranger": DRAFTERS["stranger"]}) as (engine, _):
        answer = engine.generate(PROMPT, replace(params(temperature), top_logprobs=3), decoding=decoding(mode, 4))
        without = engine.generate(PROMPT, params(temperature), decoding=decoding(mode, 4))
    assert answer.token_ids == without.token_ids
    assert without.logprobs == ()
    assert without.top_logprobs == ()
    assert not {"logprobs", "top_logprobs"} & without.as_dict().keys()
    model, tokens = target_model(), [*PROMPT, *answer.token_ids]
    cache = prefilled(model, PROMPT[:-1], len(tokens))
    rows = [forward(model, [token], cache).logits[0].log_softmax(0) for token in tokens[len(PROMPT) - 1 : -1]]
    tops = [row.topk(3) for row in rows]
    best = [pair for top in tops for pair in zip(top.indices.tolist(), top.values.tolist(), strict=True)]
    expected = [float(row[token]) for row, token in zip(rows, answer.token_ids, strict=True)]
    assert answer.logprobs == pytest.approx(expected, abs=1e-5)
    assert answer.as_dict()["logprobs"] == list(answer.logprobs)
    found = [pair for top in answer.top_logprobs for pair in top]
    assert len(answer.top_logprobs) == len(answer.token_ids)
    assert [token_id for token_id, _ in found] == [token_id for token_id, _ in best]
    assert [logprob for _, logprob in found] == pytest.approx([logprob for _, logprob in best], abs=1e-5)
    assert answer.as_dict()["top_logprobs"] == [[list(pair) for pair in top] for top in answer.top_logprobs]
