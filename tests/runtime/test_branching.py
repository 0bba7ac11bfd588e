"""Branching over real workers: the tokens of plain decoding whatever the tree is, and the counts that go with it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from memory_link import MemoryTransport
from msgspec.structs import replace as changed
from oracle import always_wrong
from runtime.pair import PROMPT, VOCAB_SIZE, SpoilingLink, decoding, oracle, pair, params, reference
from runtime.table_tree import TableTreeDrafter, spread
from table_model import TableModel

from amusd.answer import Generation
from amusd.config import DecodingConfig, SamplingParams
from amusd.drafters.autoregressive import AutoregressiveDrafter
from amusd.drafters.base import Drafter
from amusd.drafters.ngram import EarlierAnswers, NgramCache, NgramDrafter
from amusd.drafters.synthetic import SyntheticDrafter
from amusd.engine import Engine
from amusd.errors import ConfigError
from amusd.protocol.draft_session import Guesses, Node
from amusd.protocol.messages import Candidate, Message
from amusd.types import FinishReason, Mode, TokenSource

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
    with pair({}, TREES, max_delay_seconds=0.001, pass_seconds=0.001, seed=4) as (engine, _):
        expected = engine.generate(PROMPT, wanted, decoding=PLAIN)
        for name in names:
            answer = engine.generate(PROMPT, wanted, decoding=branching(), drafter=name)
            assert answer.token_ids == expected.token_ids, name
            assert (answer.policy, answer.metrics.num_refused) == ("branching", 0)
            check_counts(answer)
            accepted[name] = answer.metrics.num_accepted
    assert accepted["spread"] > 3


@pytest.mark.parametrize(("temperature", "filters"), [(0.0, {}), (1.0, FILTERS[-1])], ids=["greedy", "penalties"])
def test_a_draft_equal_to_the_target_is_always_accepted_and_never_rolls_back(
    temperature: float, filters: dict[str, Any]
) -> None:
    wanted = sampled(temperature, **filters)
    with pair({}, SAME, max_delay_seconds=0.001) as (engine, _):
        for length, fan_out in ((1, 2), (4, 3), (8, 2)):
            answer = engine.generate(PROMPT, wanted, decoding=branching(length, fan_out=fan_out))
            metrics = answer.metrics
            assert metrics.num_verified > 0
            assert metrics.num_accepted == metrics.num_verified
            assert metrics.draft is not None
            assert metrics.draft.num_rollbacks == 0
            check_counts(answer)


def test_verdicts_that_only_a_second_guess_foresaw_are_adopted_without_a_rollback() -> None:
    """The right token is always at rank 1: a chain would be rolled back at each verdict."""
    second: dict[str, Callable[[], Drafter]] = {"second": lambda: TableTreeDrafter(places=lambda _: 1)}
    first: dict[str, Callable[[], Drafter]] = {"second": oracle(NUM_TOKENS, always_wrong())}
    with pair(first, second, pass_seconds=0.004) as (engine, draft):
        one_path = {"min_candidates": 3, "verify_breadth": 1}
        two = engine.generate(PROMPT, params(NUM_TOKENS), decoding=branching(fan_out=2, **one_path))
        adopted = [e for e in draft.recorder.events if e.name == "advance" and e.fields["kept_steps"]]
        one = engine.generate(PROMPT, params(NUM_TOKENS), decoding=branching(fan_out=1, **one_path))
    assert two.token_ids == one.token_ids == reference(NUM_TOKENS)[len(PROMPT) :]
    assert two.metrics.num_accepted == one.metrics.num_accepted == 0
    assert len(adopted) > NUM_TOKENS // 2
    assert two.metrics.draft is not None
    assert one.metrics.draft is not None
    assert two.metrics.draft.num_rollbacks < 4 < one.metrics.draft.num_rollbacks


def test_a_pass_over_several_paths_accepts_what_only_a_second_guess_foresaw() -> None:
    """As above: every accepted candidate was an alternative, wherever it stood."""
    second: dict[str, Callable[[], Drafter]] = {"second": lambda: TableTreeDrafter(places=lambda _: 1)}
    with pair({}, second, pass_seconds=0.004) as (engine, _):
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
    found = [event.fields for event in engine.worker.recorder.events if event.name == "target_pass"]  # type: ignore[attr-defined]
    assert sum(fields["num_accepted_alternatives"] for fields in found) > 10


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
    with pair({}, {"spread": TREES["spread"]}, pass_seconds=0.003) as (engine, _):
        expected = engine.generate(PROMPT, wanted, decoding=PLAIN)
        for lookahead in (2, 5, 8):
            answer = engine.generate(PROMPT, wanted, decoding=branching(lookahead, fan_out=4, min_candidates=2))
            assert answer.token_ids == expected.token_ids
            assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-9)
            assert answer.top_logprobs == expected.top_logprobs
            num_accepted_alternatives += answer.metrics.num_accepted_alternatives
    assert num_accepted_alternatives > 0


def test_each_token_of_a_tree_says_where_it_comes_from() -> None:
    with pair({}, {"spread": TREES["spread"]}, pass_seconds=0.003) as (engine, _):
        stream = engine.stream(PROMPT, sampled(0.9), decoding=branching(5, fan_out=4, min_candidates=2))
        counts, metrics = Counter(token.source for token in stream), stream.generation.metrics
    assert counts[TokenSource.ALTERNATIVE] == metrics.num_accepted_alternatives > 0
    assert counts[TokenSource.CANDIDATE] == metrics.num_accepted - metrics.num_accepted_alternatives > 0
    assert counts.total() == metrics.num_tokens


@pytest.mark.parametrize(("num_tokens", "name"), [(3, "same"), (2, "spread"), (13, "spread")])
def test_eos_a_stop_string_and_the_length_end_the_answer_where_they_end_plain_decoding(
    num_tokens: int, name: str
) -> None:
    """Also in the middle of what was accepted; and the next answer is whole."""
    answer_tokens = reference(NUM_TOKENS)[len(PROMPT) :]
    eos = answer_tokens[num_tokens - 1]
    length = answer_tokens.index(eos) + 1
    with pair({}, SAME | TREES, eos_token_id=eos, pass_seconds=0.004) as (engine, _):
        schedule = branching(8, min_candidates=2)
        found = engine.generate(PROMPT, params(NUM_TOKENS), decoding=schedule, drafter=name)
        assert (found.token_ids, found.finish_reason) == (answer_tokens[:length], FinishReason.EOS)
    with pair({}, SAME | TREES, pass_seconds=0.004) as (engine, _):
        stop = engine.tokenizer.decode(answer_tokens[num_tokens : num_tokens + 2])
        for wanted, reason in (
            (params(NUM_TOKENS, (stop,)), FinishReason.STOP),
            (params(num_tokens), FinishReason.LENGTH),
            (params(NUM_TOKENS), FinishReason.LENGTH),
        ):
            plain = engine.generate(PROMPT, wanted, decoding=PLAIN)
            found = engine.generate(PROMPT, wanted, decoding=schedule, drafter=name)
            assert found.token_ids == plain.token_ids
            assert found.finish_reason is plain.finish_reason is reason
            check_counts(found)


def test_chains_and_trees_take_turns_in_one_engine() -> None:
    chains: dict[str, Callable[[], Drafter]] = {
        "same": lambda: AutoregressiveDrafter(TableModel(VOCAB_SIZE, seed=7, max_length=400))
    }
    schedules = (branching(), decoding(Mode.ASYNCHRONOUS, 4, policy="chain"), decoding(Mode.SYNCHRONOUS, 4), PLAIN)
    with pair(chains, SAME) as (engine, draft):
        for schedule in (*schedules, *reversed(schedules)):
            for prompt in (PROMPT, PROMPT[:2]):
                answer = engine.generate(prompt, params(30), decoding=schedule)
                assert answer.token_ids == reference(30, prompt)[len(prompt) :]
                if schedule is not PLAIN:
                    assert answer.metrics.num_accepted == answer.metrics.num_verified > 0
        received = [e for e in engine.worker.recorder.events if e.name == "receive"]
    sent = {e.sequence_id for e in received if e.fields["message"] == "candidate"}
    drafts_tree = {e.sequence_id: e.fields["fan_out"] > 1 for e in draft.recorder.events if e.name == "draft_prefill"}
    assert {drafts_tree[number] for number in sent} == {True, False}


class Silent(TableTreeDrafter):
    """Takes its time, and guesses nothing."""

    def expand(self, root: Node, nodes: Sequence[Node], num_tokens: int = 1) -> list[Guesses]:
        time.sleep(0.004)
        return [() for _ in nodes]


def test_what_was_looked_up_counts_as_drafted() -> None:
    """A text that repeats one token, and a model that guesses nothing: all that is accepted was looked up."""
    wanted = replace(params(60), logit_bias=((7, 100.0),))
    with pair({}, {"lookup": lambda: Silent(ngrams=NgramCache(1, 3))}, pass_seconds=0.001) as (engine, _):
        answer = engine.generate(PROMPT, wanted, decoding=branching(8, max_wait_passes=10_000.0))
    assert answer.token_ids == (7,) * 60
    assert answer.metrics.num_accepted == answer.metrics.num_verified > 30
    check_counts(answer)


# The drafter that is told the answer


@pytest.mark.parametrize("accept", [0.0, 0.5, 1.0])
def test_the_synthetic_tree_gives_the_tokens_of_plain_decoding(accept: float) -> None:
    trees = {"synthetic": lambda: SyntheticDrafter(TableTreeDrafter(), accept, accept, VOCAB_SIZE)}
    with pair({}, trees) as (engine, _):
        for wanted in (sampled(0.0), sampled(1.0)):
            plain = engine.generate(PROMPT, wanted, decoding=PLAIN).token_ids
            answer = engine.generate(PROMPT, wanted, decoding=branching(min_candidates=1), reference=plain)
            assert answer.token_ids == plain
            assert (answer.metrics.num_verified > 0) == (accept > 0)  # nothing is offered that cannot be right
            check_counts(answer)
            if accept in (0.0, 1.0):
                assert answer.metrics.num_accepted == accept * answer.metrics.num_verified


# What cannot be


def refusal(engine: Engine, wanted: SamplingParams, drafter: str) -> str:
    with pytest.raises(ConfigError) as caught:
        engine.generate(PROMPT, wanted, decoding=branching(), drafter=drafter)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_ratio_test_and_drafters_without_trees_are_refused_and_the_engine_goes_on() -> None:
    with pair({"ngram": lambda: NgramDrafter(1, 3)}, SAME) as (engine, _):
        said = refusal(engine, sampled(1.0, acceptance="rejection"), "same")
        assert said.startswith("policy=branching: not with sampling.acceptance=rejection")
        assert said.endswith("allowed: chain")
        said = refusal(engine, params(5), "ngram")
        assert said == "policy=branching: drafter=ngram drafts no trees; allowed: same"
        answer = engine.generate(PROMPT, params(5), decoding=branching(), drafter="same")
        assert answer.token_ids == reference(5)[len(PROMPT) :]
    with pair({"ngram": lambda: NgramDrafter(1, 3)}) as (engine, _):
        assert refusal(engine, params(5), "ngram").endswith("drafts no trees; allowed: none of this engine's")


BREAKS: dict[str, Callable[[Candidate], Message]] = {
    "an id that the target does not have": lambda m: changed(m, token_ids=(VOCAB_SIZE, *m.token_ids[1:])),
    "another prefix": lambda m: changed(m, prefix_hash=m.prefix_hash ^ 1),
}


@pytest.mark.parametrize("kind", BREAKS)
def test_a_message_that_breaks_the_protocol_is_refused_and_counted_and_the_answer_goes_on(kind: str) -> None:
    links: list[SpoilingLink] = []

    def wrap(link: MemoryTransport) -> Any:
        links.append(SpoilingLink(link, BREAKS[kind]))
        return links[-1]

    with pair({}, {"spread": TREES["spread"]}, wrap_target_link=wrap) as (engine, _):
        answer = engine.generate(PROMPT, params(NUM_TOKENS), decoding=branching())
        refused = [e for e in engine.worker.recorder.events if e.fields.get("reception") in ("refused", "foreign")]
    assert answer.token_ids == reference(NUM_TOKENS)[len(PROMPT) :]
    assert len(refused) == answer.metrics.num_refused == links[0].num_spoilt > 0
    assert answer.metrics.num_accepted > 0
    assert engine.draft_failure is None
