"""The synthetic drafter through the real workers: the target's own answer, accepted as often as asked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from runtime.pair import PROMPT, decoding, pair, params, reference, target_model

from amusd.commands.generate import options_of
from amusd.drafters.base import Drafter
from amusd.drafters.synthetic import SyntheticDrafter
from amusd.tracing.metrics import total


def synthetic(accept: float) -> dict[str, Callable[[], Drafter]]:
    model = target_model()
    return {"synthetic": lambda: SyntheticDrafter(model, accept, cache=model.new_cache(400))}  # type: ignore[arg-type]


def test_a_candidate_whose_predecessors_were_accepted_is_accepted_with_the_probability() -> None:
    """Blocks that are waited for are the same in each run, so this is no matter of luck."""
    accept, schedule = 0.8, decoding("synchronous", 4)
    with pair(synthetic(accept), pass_seconds=0.0) as (engine, _):
        told = [reference(150, (first, 7))[2:] for first in range(3)]
        answers = [
            engine.generate((first, 7), params(150), decoding=schedule, reference=told[first]) for first in range(3)
        ]
    assert [answer.token_ids for answer in answers] == told
    counts = total([answer.metrics for answer in answers])
    for before, after in itertools.pairwise((counts.num_drafts, *counts.accepted_by_position[:3])):
        assert before > 50
        assert after / before == pytest.approx(accept, abs=4 * (accept * (1 - accept) / before) ** 0.5)


def test_a_command_decodes_the_answer_in_advance_once_for_each_request() -> None:
    with pair(synthetic(1.0)) as (engine, _):
        options, schedule = options_of(engine), decoding("synchronous")
        assert options(PROMPT, params(8), decoding("autoregressive"))["reference"] == ()
        assert options(PROMPT, params(8), schedule, "ngram")["reference"] == ()
        for num_tokens in (8, 8, 9):
            told = options(PROMPT, params(num_tokens), schedule)["reference"]
            assert told == reference(num_tokens)[len(PROMPT) :]
        assert engine.worker.counts.num_tokens == 8 + 9
