"""Branching over real workers: the tokens of plain decoding whatever the tree is, and the counts that go with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from runtime.pair import PROMPT, VOCAB_SIZE, decoding, pair, params, reference
from runtime.table_tree import TableTreeDrafter, spread
from table_model import TableModel

from amusd.answer import Generation
from amusd.config import DecodingConfig, SamplingParams
from amusd.drafters.base import Drafter
from amusd.drafters.ngram import EarlierAnswers, NgramCache, NgramDrafter
from amusd.engine import Engine
from amusd.errors import ConfigError
from amusd.tracing.events import TargetPass
from amusd.types import Mode

NUM_TOKENS = 40
PLAIN = decoding(Mode.AUTOREGRESSIVE)
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 5},
    {"top_p": 0.9},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.05},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": ((3, 1.5), (7, -4.0))},
    {"frequency_penalty": 0.6, "presence_penalty": -0.4},
]
TREES: dict[str, Callable[[], Drafter]] = {
    "spread": lambda: TableTreeDrafter(places=spread(1)),
    "stranger": lambda: TableTreeDrafter(TableModel(VOCAB_SIZE, seed=8, max_length=400)),
    "lookup": lambda: TableTreeDrafter(places=spread(2), ngrams=NgramCache(1, 3)),
    "ngram": lambda: NgramDrafter(1, 3, EarlierAnswers(200)),
}
SAME: dict[str, Callable[[], Drafter]] = {"same": TableTreeDrafter}


def branching(length: int = 5, **changes: object) -> DecodingConfig:
    return decoding(Mode.ASYNCHRONOUS, length, policy="branching", **{"fan_out": 3, "rows_per_step": 4, **changes})


def sampled(temperature: float, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_new_tokens=NUM_TOKENS, **{"seed": 11, **changes})


def check_counts(answer: Generation) -> None:
    """What holds for every answer."""
    metrics = answer.metrics
    assert metrics.num_tokens == len(answer.token_ids)
    own = metrics.num_tokens - metrics.num_accepted  # one of each pass that no late candidate has ended
    assert metrics.num_passes - 1 <= own + metrics.num_late_accepted <= metrics.num_passes
    assert metrics.num_accepted <= metrics.num_verified
    assert metrics.num_drafts <= metrics.num_passes
    histogram = metrics.acceptance
    assert sum(histogram.values()) == metrics.num_drafts
    assert sum(judged * count for (judged, _), count in histogram.items()) == metrics.num_verified
    assert sum(accepted * count for (_, accepted), count in histogram.items()) == metrics.num_accepted
    assert list(metrics.accepted_by_position) == sorted(metrics.accepted_by_position, reverse=True)
    draft = metrics.draft
    assert draft is not None
    assert metrics.num_accepted <= draft.num_drafted
    assert draft.num_steps <= draft.num_drafted
    assert draft.num_rollbacks <= metrics.num_passes
    waste = metrics.as_dict()["wasted_draft_fraction"]
    assert waste is None or 0 <= waste <= 1


@pytest.mark.parametrize(
    ("temperature", "filters"), list(zip((0.0, 0.3, 1.0, 0.7, 1.5, 0.0), FILTERS, strict=True)), ids=str
)
def test_every_tree_gives_the_tokens_of_plain_decoding(temperature: float, filters: dict[str, Any]) -> None:
    wanted = sampled(temperature, **filters)
    accepted = dict.fromkeys(TREES, 0)
    names = ["spread", "ngram", "lookup" if temperature < 0.5 else "stranger"]
    with pair(TREES, max_delay_seconds=0.001, pass_seconds=0.001, seed=4) as (engine, _):
        expected = engine.generate(PROMPT, wanted, decoding=PLAIN)
        for name in names:
            answer = engine.generate(PROMPT, wanted, decoding=branching(), drafter=name)
            assert answer.token_ids == expected.token_ids, name
            assert (answer.policy, answer.metrics.num_refused) == ("branching", 0)
            check_counts(answer)
            accepted[name] = answer.metrics.num_accepted
    assert accepted["spread"] > 3


def test_a_pass_over_several_paths_accepts_what_only_a_second_guess_foresaw() -> None:
    """As above: every accepted candidate was an alternative, wherever it stood."""
    second: dict[str, Callable[[], Drafter]] = {"second": lambda: TableTreeDrafter(places=lambda _: 1)}
    with pair(second, pass_seconds=0.004) as (engine, _):
        expected = engine.generate(PROMPT, params(NUM_TOKENS), decoding=PLAIN).token_ids
        for breadth in (2, 3):
            answer = engine.generate(
                PROMPT, params(NUM_TOKENS), decoding=branching(fan_out=2, min_candidates=3, verify_breadth=breadth)
            )
            metrics = answer.metrics
            assert answer.token_ids == expected
            assert metrics.num_accepted_alternatives == metrics.num_accepted > 5
            assert metrics.num_alternatives > metrics.num_accepted_alternatives
            assert metrics.num_late_accepted == 0
            check_counts(answer)
    passes = [event for event in engine.worker.recorder.events if isinstance(event, TargetPass)]
    assert sum(event.num_accepted_alternatives for event in passes) > 10


@pytest.mark.parametrize(
    ("temperature", "filters"),
    [(0.0, {}), (0.9, FILTERS[3]), (0.9, FILTERS[4])],
    ids=["greedy", "filters", "penalties"],
)
def test_several_paths_give_the_tokens_and_logprobs_of_plain_decoding(
    temperature: float, filters: dict[str, Any]
) -> None:
    wanted = sampled(temperature, top_logprobs=4, **filters)
    num_accepted_alternatives = 0
    with pair({"spread": TREES["spread"]}, pass_seconds=0.003) as (engine, _):
        expected = engine.generate(PROMPT, wanted, decoding=PLAIN)
        for lookahead in (2, 5, 8):
            answer = engine.generate(PROMPT, wanted, decoding=branching(lookahead, fan_out=4, min_candidates=2))
            assert answer.token_ids == expected.token_ids
            assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-9)
            assert answer.top_logprobs == expected.top_logprobs
            num_accepted_alternatives += answer.metrics.num_accepted_alternatives
    assert num_accepted_alternatives > 0


# What cannot be


def refusal(engine: Engine, wanted: SamplingParams, drafter: str) -> str:
    with pytest.raises(ConfigError) as caught:
        engine.generate(PROMPT, wanted, decoding=branching(), drafter=drafter)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_ratio_test_and_drafters_without_trees_are_refused_and_the_engine_goes_on() -> None:
    with pair({"cascade": lambda: NgramDrafter(1, 3), **SAME}) as (engine, _):
        said = refusal(engine, sampled(1.0, acceptance="rejection"), "same")
        assert said.startswith("policy=branching: not with sampling.acceptance=rejection")
        assert said.endswith("allowed: chain")
        said = refusal(engine, params(5), "cascade")
        assert said.startswith("policy=branching: drafter=cascade drafts no trees; allowed: embedded, ")
        answer = engine.generate(PROMPT, params(5), decoding=branching(), drafter="same")
        assert answer.token_ids == reference(5)[len(PROMPT) :]
