"""Both workers under any faults: every token exact, each candidate from its prefix, and a draft again when they end."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest
from faults.simulation import MAX_NUM_SEQS, MAX_PASSES_TO_ACCEPT, run
from faults.weather import FAULTS

NUM_SEEDS = 100
MUST_HAPPEN = {
    *FAULTS,
    *("auto", "branching", "chain", "synchronous", "windowed"),
    "rest",
    "partitioned",
    "lost",
    "restart",
    "rollback",
    "adoption",
    "alternative scored",
    "alternative accepted",
    "stale candidate",
    "stale verdict",
    "end of a sequence lost",
    "candidate of an earlier incarnation",
    "candidate of an earlier answer",
    "reception taken",
    "reception stale",
    "reception contradicted",
    "cancelled",
    "cancelled in its prompt",
    *(f"pass over {number}" for number in range(1, MAX_NUM_SEQS + 1)),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    "num_seeds", [NUM_SEEDS, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)
def test_no_fault_costs_a_token_and_a_draft_is_used_again_when_they_end(num_seeds: int) -> None:
    counts, violations, alive = Counter[str](), [], []
    for seed in range(num_seeds):
        report = run(seed)
        counts += report.counts
        if report.violation is not None:
            violations.append(f"python -m tests.faults {seed}  # {report.violation}")
        if report.passes_to_accept is not None:
            alive.append(report.passes_to_accept)
    assert violations == []
    assert MUST_HAPPEN - counts.keys() == set()
    assert num_seeds == NUM_SEEDS or counts["drafter opened again"] > 0
    # Half of the seeds end their faults; of these nearly all must have a draft again, and soon.
    assert len(alive) >= num_seeds // 2 - num_seeds // 50
    assert max(alive) <= MAX_PASSES_TO_ACCEPT


def test_a_seed_replays_byte_by_byte() -> None:
    report = run(2)
    assert report.counts["reception taken"] > 3
    assert run(2).log == report.log
    assert run(4).log != report.log
