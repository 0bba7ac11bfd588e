"""Synchronous decoding in trees: the draft takes its steps and stops, the target verifies the likeliest paths."""

from __future__ import annotations

import pytest
from runtime.pair import PROMPT, decoding, pair, params, reference
from runtime.test_branching import NUM_TOKENS, SAME, TREES, check_counts, sampled

from amusd.config import DecodingConfig
from amusd.types import Mode


def tree(num_steps: int, **changes: object) -> DecodingConfig:
    return decoding(Mode.SYNCHRONOUS, num_steps, tree=True, **{"fan_out": 3, "rows_per_step": 4, **changes})


@pytest.mark.parametrize(("name", "num_steps"), [("spread", 4), ("stranger", 2), ("lookup", 4), ("ngram", 1)])
def test_the_tokens_are_those_of_plain_decoding(name: str, num_steps: int) -> None:
    with pair({name: TREES[name]}) as (engine, _):
        answer = engine.generate(PROMPT, params(NUM_TOKENS), decoding=tree(num_steps), drafter=name)
        drawn = engine.generate(PROMPT, sampled(0.8), decoding=tree(num_steps), drafter=name)
        plain = engine.generate(PROMPT, sampled(0.8), decoding=decoding(Mode.AUTOREGRESSIVE))
    assert tuple(answer.token_ids) == reference(NUM_TOKENS)[len(PROMPT) :]
    assert drawn.token_ids == plain.token_ids
    for one in (answer, drawn):
        check_counts(one)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_the_draft_takes_its_steps_and_stops(num_steps: int) -> None:
    with pair(SAME, pass_seconds=0.01) as (engine, _):
        metrics = engine.generate(PROMPT, params(NUM_TOKENS), decoding=tree(num_steps), drafter="same").metrics
    assert metrics.num_tokens / metrics.num_passes > num_steps  # each block is accepted, and a token more
    assert metrics.draft is not None
    assert num_steps * (metrics.num_passes - 2) <= metrics.draft.num_steps <= num_steps * metrics.num_passes
