"""`amusd simulate`: from a configuration to rows and a table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from lines import refusal

from amusd.commands.simulate import simulate, simulator_of
from amusd.commands.tables import report
from amusd.config import RunConfig
from amusd.settings import from_mapping

SMALL = {"num_tokens": 20, "synchronous_lengths": [2, 4], "min_candidates": [0, 3]}
UNKNOWN = {"accept": None, "verify_ms": None, "draft_ms": None, "delay_ms": None}


def configured(simulate: dict[str, Any] | None = None, **values: Any) -> RunConfig:
    given = {"accept": 0.7, "verify_ms": 20, "draft_ms": 2.5, "delay_ms": 0.05, "simulate": SMALL | (simulate or {})}
    return from_mapping(RunConfig, given | values)


def predicted(config: RunConfig, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    return simulate(config, simulator_of(config), folder)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("recorded")
    tried = {"num_tokens": 300, "synchronous_lengths": [4], "min_candidates": [2]}
    config = configured(tried, policy="branching")
    return folder, predicted(config, folder / "events")


def test_rows_are_plain_every_length_every_wait_and_what_finds_its_own(tmp_path: Path) -> None:
    result = predicted(configured({"min_candidates": [0, 3]}), tmp_path)
    rows = result["rows"]
    assert [(row["policy"] or row["mode"], row["num_speculative_tokens"], row["min_candidates"]) for row in rows] == [
        ("autoregressive", None, None),
        *[(name, length, None) for name in ("synchronous", "windowed") for length in (2, 4)],
        *[(name, None, wait) for name in ("chain", "branching") for wait in (0, 2, 3)],
        ("auto", None, None),
    ]
    plain = rows[0]["tokens_per_second"]
    assert plain == pytest.approx(50, rel=0.03)
    best = max(row["tokens_per_second"] for row in rows if row["mode"] == "synchronous")
    for row in rows:
        assert row["tokens_per_verification"] == row["num_tokens"] / row["num_passes"]
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / plain)
    for row in rows[1:]:
        assert row["speedup_vs_best_synchronous"] == pytest.approx(row["tokens_per_second"] / best)
    inputs = result["inputs"]
    assert inputs["acceptance"] == {"kind": "drawn", "accept": 0.7}
    assert inputs["max_candidates_in_a_pass"] == 7
    assert inputs["costs"]["to_draft_ms"] == pytest.approx(0.05)
    assert inputs["costs"]["tree_row_ms"] == pytest.approx(0.06 * 2.5)
    table, legend, advice = report(result["rows"]).split("\n\n")
    header, _, *lines = table.splitlines()
    assert [line.partition("  ")[0] for line in lines][-2:] == [
        "asynchronous (branching, waits for 3)",
        "asynchronous (auto)",
    ]
    assert re.split("  +", header)[1:] == [
        *("tokens/s", "x plain", "x best sync", "accepted", "tokens/pass", "idle t", "idle d", "wasted", "s/answer")
    ]
    assert "accepted: " in legend
    assert advice.startswith("Use mode=asynchronous policy=")


def test_what_is_given_wins_over_what_a_run_has_shown(recorded: tuple[Path, dict[str, Any]]) -> None:
    def found(simulate: dict[str, Any] | None = None, **values: Any) -> Any:
        return simulator_of(configured(simulate, **{**UNKNOWN, "calibration": str(recorded[0]), **values}))

    measured = found()
    assert measured.accept_next == pytest.approx(0.4, abs=0.15)
    assert measured.costs.tree_row_ns == pytest.approx(150_000, rel=0.3)
    assert set(measured.costs.tree_steps) > {1, 8}
    given = found({"knee_rows": 9, "sequence_ms": 0.5}, verify_ms=40, draft_ms=2.0)
    assert (given.costs.tree_row_ns, given.costs.tree_steps) == (0, {})
    assert given.costs.passes[0].mean_ms == 40
    assert (given.costs.sequence_ns, given.costs.draft_sequence_ns) == (500_000, 25_000)
    assert found(draft_ms=1.0).costs.tree_row_ns == 60_000
    assert (found(accept=0.5).accept, found(accept=0.5).accept_next) == (0.5, 0.4)


def test_a_pass_verifies_a_whole_window_as_in_compare() -> None:
    config = configured(policy="windowed", num_speculative_tokens=16)
    assert simulator_of(config).max_candidates == config.engine_for("compare").max_verify_width - 1


def test_a_run_is_simulated_from_its_own_events(recorded: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, first = recorded
    tried = {"synchronous_lengths": [4], "min_candidates": [2], "batch_size": 3, "knee_rows": 200}
    again = predicted(configured(tried, **UNKNOWN, calibration=str(folder)), tmp_path)
    assert again["inputs"]["acceptance"]["kind"] == "replay"
    # It fills no more places than it has answers.
    assert (again["inputs"]["num_answers"], again["inputs"]["batch_size"]) == (1, 1)
    assert again["inputs"]["costs"]["knee_rows"] == 200
    for before, after in zip(first["rows"], again["rows"], strict=True):
        assert after["speedup"] == pytest.approx(before["speedup"], rel=0.15)


MISTAKES = [
    ({"accept": None, "verify_ms": 1.0}, "accept: required to simulate without calibration=RUN_DIR"),
    ({"max_verify_width": 4}, "max_verify_width=4: must be at least 5: 4 candidates"),
    ({"calibration": "/proc/nowhere"}, "calibration=/proc/nowhere: no such folder"),
    ({"verify_ms": 1e-7}, "verify_ms=1e-07: expected a number from 1e-06 to 1000000"),
    ({"calibration": "a" * 300}, f"calibration={'a' * 300}: its events/"),
]


@pytest.mark.parametrize(("values", "message"), MISTAKES, ids=[message.split(":")[0] for _, message in MISTAKES])
def test_a_mistake_is_one_line(values: dict[str, Any], message: str) -> None:
    assert refusal(lambda: simulator_of(configured(**values))).startswith(message)
