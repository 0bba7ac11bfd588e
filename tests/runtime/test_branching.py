"""Trees over real workers: the tokens of plain decoding whatever the tree is, and the counts that go with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from runtime.pair import PROMPT, VOCAB_SIZE, decoding, pair, params, reference
from runtime.table_tree import TableTreeDrafter, spread
from runtime.test_sampled import FILTERS, NUM_TOKENS
from runtime.test_sampled import params as sampled
from table_model import TableModel

from amusd.answer import Generation
from amusd.config import DecodingConfig
from amusd.drafters.base import Drafter
from amusd.drafters.ngram import EarlierAnswers, NgramCache, NgramDrafter
from amusd.tracing.events import TargetPass

PLAIN = decoding("autoregressive")
TREES: dict[str, Callable[[], Drafter]] = {
    "spread": lambda: TableTreeDrafter(places=spread(1)),
    "stranger": lambda: TableTreeDrafter(TableModel(VOCAB_SIZE, seed=8, max_length=400)),
    "lookup": lambda: TableTreeDrafter(places=spread(2), ngrams=NgramCache(1)),
    "ngram": lambda: NgramDrafter(1, EarlierAnswers(200)),
}


def branching(length: int = 5, **changes: object) -> DecodingConfig:
    """A schedule whose passes wait for candidates, however slow the draft is."""
    tree = {"fan_out": 3, "rows_per_step": 4, "max_wait_passes": 1e6}
    return decoding("asynchronous", length, policy="branching", **{**tree, **changes})


def blocks(num_steps: int) -> DecodingConfig:
    return decoding("synchronous", num_steps, tree=True, fan_out=3, rows_per_step=4)


def check_counts(answer: Generation) -> None:
    """Check what holds for every answer's counts."""
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
    assert draft.num_rollbacks <= metrics.num_passes
    waste = metrics.as_dict()["wasted_draft_fraction"]
    assert waste is None or 0 <= waste <= 1


@pytest.mark.parametrize(
    ("temperature", "filters"), list(zip((0.0, 0.3, 1.0, 0.7, 1.5, 0.0), FILTERS, strict=True)), ids=str
)
def test_every_tree_gives_the_tokens_and_logprobs_of_plain_decoding(
    temperature: float, filters: dict[str, Any]
) -> None:
    wanted, num_alternatives = sampled(temperature, top_logprobs=4, **filters), 0
    names = ["ngram", "lookup" if temperature < 0.5 else "stranger", "spread"]
    with pair(TREES, max_delay_seconds=0.001, pass_seconds=0.001, seed=4) as (engine, _):
        expected = engine.generate(PROMPT, wanted, decoding=PLAIN)
        for name, lookahead in zip(names, (2, 5, 8), strict=True):
            answer = engine.generate(PROMPT, wanted, decoding=branching(lookahead, fan_out=4), drafter=name)
            assert answer.token_ids == expected.token_ids, name
            assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-9)
            assert answer.top_logprobs == expected.top_logprobs
            assert (answer.policy, answer.metrics.num_refused) == ("branching", 0)
            check_counts(answer)
            num_alternatives += answer.metrics.num_accepted_alternatives
    assert answer.metrics.num_accepted > 3
    assert num_alternatives > 0


def test_a_pass_over_several_paths_accepts_what_only_a_second_guess_foresaw() -> None:
    """Every accepted candidate was an alternative, wherever it stood."""
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


@pytest.mark.parametrize(("name", "num_steps"), [("spread", 4), ("stranger", 2), ("lookup", 4), ("ngram", 1)])
def test_blocks_of_a_tree_give_the_tokens_of_plain_decoding(name: str, num_steps: int) -> None:
    with pair({name: TREES[name]}) as (engine, _):
        answer = engine.generate(PROMPT, params(NUM_TOKENS), decoding=blocks(num_steps), drafter=name)
        drawn = engine.generate(PROMPT, sampled(0.8), decoding=blocks(num_steps), drafter=name)
        plain = engine.generate(PROMPT, sampled(0.8), decoding=PLAIN)
    assert tuple(answer.token_ids) == reference(NUM_TOKENS)[len(PROMPT) :]
    assert drawn.token_ids == plain.token_ids
    for one in (answer, drawn):
        check_counts(one)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_the_draft_of_a_block_takes_its_steps_and_stops(num_steps: int) -> None:
    with pair({"same": TableTreeDrafter}, pass_seconds=0.01) as (engine, draft):
        metrics = engine.generate(PROMPT, params(NUM_TOKENS), decoding=blocks(num_steps), drafter="same").metrics
    assert metrics.num_tokens / metrics.num_passes > num_steps  # each block is accepted, and a token more
    taken = sum(event.name == "draft_step" for event in draft.recorder.events)
    assert num_steps * (metrics.num_passes - 2) <= taken <= num_steps * metrics.num_passes
