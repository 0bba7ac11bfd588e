"""The figures that benchmark clients read: histograms add up to the counts, latencies to the time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amusd.protocol.verification import PassOutcome
from amusd.tracing.metrics import GenerationMetrics, total

passes = st.integers(0, 8).flatmap(
    lambda candidates: st.tuples(st.just(candidates), st.integers(candidates, candidates + 1)).flatmap(
        lambda block: st.tuples(st.just(block[0]), st.just(block[1]), st.integers(0, block[1]))
    )
)
"""(candidates, judged with a late one, accepted)"""


def tally_of(blocks: list[tuple[int, int, int]]) -> GenerationMetrics:
    tally = GenerationMetrics(num_prompt_tokens=1)
    for candidates, judged, accepted in blocks:
        tally.passed(
            5000,
            1000,
            PassOutcome(
                num_candidates=candidates,
                num_judged=judged,
                num_accepted=accepted,
                num_alternatives=0,
                num_accepted_alternatives=0,
                num_tokens=accepted + 1,
            ),
        )
    return tally


def check_laws(metrics: GenerationMetrics) -> None:
    figures = metrics.as_dict()
    found = figures["speculative_decoding"]
    histogram = found["acceptance_histogram"]
    by_length = found["acceptance_histogram_by_draft_length"]
    assert sum(histogram) == found["num_spec_steps"] == figures["num_spec_steps"]
    accepted = found["num_accepted_draft_tokens"]
    assert sum(count * steps for count, steps in enumerate(histogram)) == accepted == metrics.num_accepted
    assert sum(int(length) * sum(row) for length, row in by_length.items()) == found["num_draft_tokens"]
    assert found["num_draft_tokens"] == metrics.num_verified
    for count, steps in enumerate(histogram):
        assert steps == sum(row[count] for row in by_length.values() if count < len(row))
    assert all(len(row) == int(length) + 1 for length, row in by_length.items())
    assert len(histogram) == found["num_spec_tokens"] + 1
    if found["num_spec_steps"]:
        assert 1 <= found["mean_acceptance_length"] <= found["num_spec_tokens"] + 1
        assert found["draft_acceptance_rate"] == figures["acceptance_rate"]
        by_position = [sum(histogram[position + 1 :]) for position in range(len(metrics.accepted_by_position))]
        assert by_position == list(metrics.accepted_by_position)
    else:
        assert found["mean_acceptance_length"] is None
    if metrics.num_tokens > metrics.num_prompts:
        whole_ms = figures["time_per_output_token_ms"] * (metrics.num_tokens - metrics.num_prompts)
        assert whole_ms == pytest.approx(metrics.decode_ns / 1e6)
    if metrics.chunk_gaps_ns:
        assert figures["median_inter_token_latency_ms"] <= figures["p99_inter_token_latency_ms"]
        assert sum(metrics.chunk_gaps_ns) == metrics.decode_ns
        assert len(metrics.chunk_gaps_ns) == metrics.num_passes - metrics.num_prompts


@settings(max_examples=40)
@given(answers=st.lists(st.lists(passes, min_size=1, max_size=12), min_size=1, max_size=4))
def test_histograms_and_latencies_add_up_for_one_answer_and_for_several(
    answers: list[list[tuple[int, int, int]]],
) -> None:
    each = [tally_of(blocks) for blocks in answers]
    for metrics in (*each, total(each)):
        check_laws(metrics)


def test_an_example_by_hand() -> None:
    metrics = tally_of([(2, 2, 2), (3, 3, 0), (0, 0, 0), (1, 2, 2)])
    assert metrics.as_dict()["speculative_decoding"] == {
        "mean_acceptance_length": 1 + 4 / 3,
        "draft_acceptance_rate": 4 / 7,
        "acceptance_histogram": [1, 0, 2, 0],
        "acceptance_histogram_by_draft_length": {"2": [0, 0, 2], "3": [1, 0, 0, 0]},
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 7,
        "num_spec_tokens": 3,
    }


def test_latencies_of_an_example_by_hand() -> None:
    figures = GenerationMetrics(
        num_tokens=5,
        first_token_ns=30_000_000,
        total_ns=70_000_000,
        chunk_gaps_ns=[10_000_000, 25_000_000, 5_000_000],
    ).as_dict()
    assert figures["time_to_first_token_ms"] == 30
    assert figures["time_per_output_token_ms"] == 10
    assert figures["median_inter_token_latency_ms"] == 10
    assert figures["p99_inter_token_latency_ms"] == 25
