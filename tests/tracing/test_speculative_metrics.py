"""The figures that benchmark clients read: histograms add up to the counts, latencies to the time."""

from __future__ import annotations

from amusd.protocol.verification import PassOutcome
from amusd.tracing.metrics import GenerationMetrics


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
