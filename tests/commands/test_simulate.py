"""`amusd simulate`: from a configuration to rows, a map and a table."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest

from amusd.commands import simulate as command
from amusd.commands.simulate import schedules, simulate_text
from amusd.commands.simulate.inputs import inputs_of
from amusd.config import RunConfig
from amusd.console import Console
from amusd.errors import ConfigError
from amusd.settings import from_mapping
from experiments.closed_forms import best_synchronous

SMALL = {"num_answers": 2, "num_tokens": 30, "synchronous_lengths": [2, 4], "min_candidates": [0, 3]}
UNKNOWN = {"accept": None, "verify_ms": None, "draft_ms": None, "delay_ms": None}


def configured(simulate: dict[str, Any] | None = None, **values: Any) -> RunConfig:
    given = {"accept": 0.7, "verify_ms": 20, "draft_ms": 2.5, "delay_ms": 0.05, "simulate": SMALL | (simulate or {})}
    return from_mapping(RunConfig, given | values)


def predicted(config: RunConfig, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(json_only=True, out=io.StringIO(), err=io.StringIO())
    return command.simulate(config, inputs_of(config), console, folder)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The run directory of a simulated run of trees, and its result."""
    folder = tmp_path_factory.mktemp("recorded")
    tried = {"num_answers": 1, "num_tokens": 300, "synchronous_lengths": [4], "min_candidates": [2]}
    config = configured({"draft_row_ms": 0.3, **tried}, policy="branching", drafter={"accept_next": 0.6})
    return folder, predicted(config, folder / "events")


@pytest.fixture(scope="module")
def mapped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "GRID_ACCEPTS", (0.0, 0.8))
        patch.setattr(command, "GRID_RATIOS", (2.0, 10.0))
        longer = {"grid": True, "num_tokens": 50}
        return predicted(configured(longer), tmp_path_factory.mktemp("mapped"))


def test_rows_are_plain_every_length_every_wait_and_what_finds_its_own(tmp_path: Path) -> None:
    result = predicted(configured({"min_candidates": [0, 2, 3]}, fan_out=4), tmp_path)
    rows = result["rows"]
    waits = [2, 0, 2, 3]
    assert [(row["policy"] or row["mode"], row["num_speculative_tokens"], row["min_candidates"]) for row in rows] == [
        ("autoregressive", None, None),
        *[(name, length, None) for name in ("synchronous", "windowed") for length in (2, 4)],
        *[(name, None, wait) for name in ("chain", "branching") for wait in waits],
        ("auto", None, None),
    ]
    assert rows[0]["speedup"] == 1
    assert rows[0]["tokens_per_second"] == pytest.approx(50)
    assert [row["fan_out"] for row in rows] == [None] * 9 + [4] * 5
    assert [row["rows_per_step"] for row in rows] == [None] * 9 + [16] * 5
    best = {row["policy"] or row["mode"]: row for row in rows if row["choice"] == "best"}
    assert list(best) == ["synchronous", "windowed", "chain", "branching"]
    for name, row in best.items():
        assert row["speedup"] == max(other["speedup"] for other in rows if name in (other["policy"], other["mode"]))
    for row in rows[1:]:
        assert row["tokens_per_second"] == pytest.approx(50 * row["speedup"])
        assert row["speedup_vs_best_synchronous"] == pytest.approx(row["speedup"] / best["synchronous"]["speedup"])
    assert result["inputs"]["acceptance"] == {"kind": "drawn", "accept": 0.7}
    assert result["inputs"]["max_candidates_in_a_pass"] == 7
    assert result["inputs"]["costs"]["to_draft"]["mean_ms"] == pytest.approx(0.05)
    assert result["inputs"]["costs"]["tree_row_ms"] == pytest.approx(0.06 * 2.5)


def test_the_map_names_the_winner_of_each_place(mapped: dict[str, Any]) -> None:
    cells = {(cell["accept"], cell["ratio"]): cell for cell in mapped["grid"]}
    assert set(cells) == {(0.0, 2.0), (0.0, 10.0), (0.8, 2.0), (0.8, 10.0)}
    for (accept, ratio), cell in cells.items():
        ranked = sorted(cell["speedups"].values(), reverse=True)
        assert cell["speedups"][cell["winner"]] == ranked[0]
        assert cell["margin"] == pytest.approx(ranked[0] / ranked[1] - 1)
        expected = best_synchronous(accept, ratio, [2, 4], overhead=0.005)[0]
        assert cell["speedups"]["synchronous"] == pytest.approx(expected, rel=0.1)
        assert set(cell["min_candidates"]) == {"chain", "branching"}
        assert cell["window"] in (2, 4)
    assert cells[0.8, 2.0]["speedups"]["chain"] > cells[0.8, 2.0]["speedups"]["synchronous"]
    assert cells[0.0, 2.0]["speedups"]["chain"] == 1
    assert cells[0.8, 10.0]["winner"] == "branching"


def test_what_a_tree_costs_and_brings_is_given_or_measured(recorded: tuple[Path, dict[str, Any]]) -> None:
    def found(simulate: dict[str, Any] | None = None, **values: Any) -> Any:
        return inputs_of(configured(simulate, **{**UNKNOWN, "calibration": str(recorded[0]), **values})).simulator

    measured = found()
    assert measured.accept_next == pytest.approx(0.6, abs=0.15)
    assert measured.costs.tree_row_ns == pytest.approx(300_000, rel=0.01)
    assert {rows: shared.together.mean_ms for rows, shared in measured.costs.tree_steps.items()} == pytest.approx(
        {rows: 2.5 + 0.3 * (rows - 1) for rows in measured.costs.tree_steps}, rel=0.01
    )
    given = found({"draft_row_ms": 1.0})
    assert (given.costs.tree_row_ns, given.costs.tree_steps) == (1_000_000, {})
    faster = found(draft_ms=1.0)
    assert (faster.costs.tree_row_ns, faster.costs.tree_steps) == (60_000, {})
    assert found(accept=0.5, drafter={"accept_next": 0.2}).accept_next == 0.2


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


def test_what_is_given_wins_over_what_was_measured(recorded: tuple[Path, dict[str, Any]]) -> None:
    calibrated = {**UNKNOWN, "calibration": str(recorded[0])}
    costs = inputs_of(configured({"sequence_ms": 0.5}, **{**calibrated, "verify_ms": 40})).simulator.costs
    assert costs.passes[0].alone.mean_ms == 40
    assert costs.draft_token.alone.mean_ms == pytest.approx(2.5)
    assert costs.sequence_ns == 500_000
    given = inputs_of(configured(**{**calibrated, "accept": 0.7}))
    assert given.acceptance == {"kind": "drawn", "accept": 0.7}


def test_the_table_has_one_line_for_each_schedule_and_says_what_it_means_and_what_to_use(
    mapped: dict[str, Any],
) -> None:
    rows, legend, places, meaning, advice = simulate_text(mapped).split("\n\n")
    lines = rows.splitlines()
    assert [line.partition("  ")[0] for line in lines[2:]] == [
        "autoregressive",
        *["synchronous, 2 tokens", "synchronous, 4 tokens", "windowed, 2 tokens", "windowed, 4 tokens"],
        *[f"{policy}, waits for {wait}" for policy in ("chain", "branching") for wait in (2, 0, 3)],
        "auto",
    ]
    chosen = {line.partition("  ")[0]: line.rpartition("%")[2].strip() for line in lines[2:]}
    assert "configured" in chosen["chain, waits for 2"]
    assert "configured" in chosen["branching, waits for 2"]
    assert sum("best" in choice for choice in chosen.values()) == 4
    assert (chosen["autoregressive"], chosen["auto"]) == ("", "")
    assert re.split("  +", lines[0])[1:] == [
        *("tokens/s", "x plain", "x best sync", "accepted", "tokens/pass", "idle t", "idle d", "wasted", "chosen")
    ]
    assert all(f"{name}: " in legend for name in ("accepted", "tokens/pass", "wasted", "chosen", "idle t, d"))
    assert places.splitlines()[0].split() == ["accept", "\\", "verify/draft", "2", "10"]
    assert places.splitlines()[3].startswith("0.8 ")
    assert meaning.startswith("for each acceptance")
    assert advice.startswith("Use mode=asynchronous policy=")


def test_no_more_answers_are_simulated_than_tell_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "LARGEST_ERROR", 0.05)

    def taken(**simulate: int) -> tuple[int, float]:
        config = configured({"num_answers": 64, "num_tokens": 30, **simulate})
        bench = schedules.steady_bench(inputs_of(config).simulator, config.decoding())
        return len(bench.simulator.answers), bench.asynchronous("auto").outcome.relative_error

    number, error = taken()
    assert 4 <= number < 64
    assert error <= 0.05
    assert taken(num_tokens=6)[0] > number
    assert taken(batch_size=48)[0] >= 48
    assert taken(batch_size=6, num_answers=2)[0] == 6


def test_batches_share_passes_and_are_compared_with_plain_batches(tmp_path: Path) -> None:
    four = {"batch_size": 4, "num_answers": 4, "sequence_ms": 0.5, "min_candidates": [2]}
    result = predicted(configured(four), tmp_path)
    plain, best, *_ = (row for row in result["rows"] if row["choice"] != "tried")
    assert plain["speedup"] == 1
    assert plain["tokens_per_second"] == pytest.approx(4 * 1000 / (20 + 3 * 0.5))
    assert plain["mean_latency_ms"] == pytest.approx(30 * 21.5)
    assert best["speedup"] == pytest.approx(best["tokens_per_second"] / plain["tokens_per_second"])
    costs = result["inputs"]["costs"]
    assert (costs["sequence_ms"], costs["draft_sequence_ms"], costs["knee_rows"]) == (0.5, 0, None)
    head, _, header = simulate_text(result).splitlines()[:3]
    assert head.startswith("4 answers at a time: tokens/s of all together, s/answer of each")
    assert header.split()[-2:] == ["s/answer", "chosen"]


MISTAKES = [
    ({"accept": None, "verify_ms": 1.0}, "accept: required to simulate without calibration=RUN_DIR"),
    ({"simulate": {"devices_apart": True}}, "simulate.devices_apart=true: needs calibration=RUN_DIR"),
    ({"policy": "/proc/nowhere.py:make"}, "policy=/proc/nowhere.py:make: "),
    ({"max_lookahead": 2}, "simulate.min_candidates=3: must be at most max_lookahead (2)"),
    ({"max_verify_width": 4}, "max_verify_width=4: must be at least 5: 4 candidates"),
    ({"calibration": "/proc/nowhere"}, "calibration=/proc/nowhere: its events/ show no draft token"),
    ({"simulate": {"batch_size": 2, "grid": True}}, "simulate.batch_size=2: must be 1 with simulate.grid=true"),
]


@pytest.mark.parametrize(("values", "message"), MISTAKES, ids=[message.split(":")[0] for _, message in MISTAKES])
def test_a_mistake_is_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        inputs_of(configured(values.pop("simulate", None), **values))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


OWN_POLICY = """
from amusd.policies.schedules import ChainPolicy

def make(decoding, *, can_branch):
    return ChainPolicy(max_lookahead=4, min_candidates=1, max_wait_passes=1.0)
"""


def test_a_policy_of_the_users_own_has_a_row(tmp_path: Path) -> None:
    own = f"{tmp_path / 'mine.py'}:make"
    (tmp_path / "mine.py").write_text(OWN_POLICY)
    config = configured({"synchronous_lengths": [4], "min_candidates": [2]}, policy=own)
    *others, row = predicted(config, tmp_path)["rows"]
    assert row["policy"] == own
    assert row["speedup"] > 1
    assert own not in [other["policy"] for other in others]
