"""Where a speed-up goes, and whether the committed measurements add up."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments import account

RESULTS = sorted((Path(__file__).parents[2] / "experiments").glob("*/results/*.json"))


def comparisons(found: Any) -> Iterator[list[dict[str, Any]]]:
    """The rows of a pair in every table of a file of results that says where their time went."""
    if isinstance(found, dict):
        rows = found.get("rows")
        if isinstance(rows, list) and rows and "time" in rows[0]:
            yield [row for row in rows if row.get("layout", "pair") == "pair"]
        for value in found.values():
            yield from comparisons(value)
    elif isinstance(found, list):
        for value in found:
            yield from comparisons(value)


def row(
    mode: str, tokens: int, passes: int, seconds: float, in_passes: float, **histogram: list[int]
) -> dict[str, Any]:
    target = {"prefill": 1 - in_passes, "waits": 0.0, "host": 0.0, "full_passes": in_passes}
    return {
        "mode": mode,
        "policy": "chain",
        "drafter": "ngram",
        "num_tokens": tokens,
        "num_passes": passes,
        "mean_acceptance_length": tokens / passes,
        "tokens_per_second": tokens / seconds,
        "ms_per_token": 1000 * seconds / tokens,
        "speculative_decoding": {"acceptance_histogram_by_draft_length": histogram},
        "time": {"target": target | {"partial_passes": 0.0, "passes_without_candidates": 0.0}},
    }


def test_the_factors_make_the_speed_up() -> None:
    plain, chain = row("autoregressive", 100, 100, 4.0, 0.95), row("asynchronous", 100, 40, 2.5, 0.8)
    (found,) = account.account([plain, chain])
    assert found["tokens_per_pass"] == 2.5
    assert found["pass_time"] == pytest.approx((4 * 0.95 / 100) / (2.5 * 0.8 / 40))
    assert found["share_in_passes"] == pytest.approx(0.8 / 0.95)
    assert found["speedup"] == pytest.approx(1.6)
    assert found["of_tokens_per_pass"] == pytest.approx(0.64)
    factors = found["tokens_per_pass"] * found["pass_time"] * found["share_in_passes"]
    assert factors == pytest.approx(found["speedup"])
    assert "0.64" in account.text([found])


def test_only_tested_candidates_count_for_acceptance() -> None:
    passes = {"2": [5, 3, 2], "1": [4, 6]}
    accepted, tested = 3 + 2 * 2 + 6, (5 + 3 * 2 + 2 * 2) + (4 + 6)
    assert account.acceptance(row("asynchronous", 1, 1, 1.0, 1.0, **passes)) == accepted / tested
    assert account.acceptance(row("asynchronous", 1, 1, 1.0, 1.0)) == 0
    assert (account.bound(0.5), account.bound(1.0)) == (2, math.inf)


def test_time_adds_up_in_every_committed_measurement() -> None:
    tables = [(path.name, rows) for path in RESULTS for rows in comparisons(json.loads(path.read_text()))]
    assert len(tables) > 10
    for name, rows in tables:
        for one in rows:
            assert one["time"]["draft"] or one["mode"] == "autoregressive"
            for role, shares in ((role, shares) for role, shares in one["time"].items() if shares):
                assert sum(shares.values()) == pytest.approx(1, abs=0.01), (name, one["contestant"], role)
        for found in account.account(rows) if rows[0]["mode"] == "autoregressive" else ():
            factors = found["tokens_per_pass"] * found["pass_time"] * found["share_in_passes"]
            assert factors == pytest.approx(found["speedup"], rel=0.01), (name, found["kind"])
