"""`amusd simulate`: from a configuration to rows, a map and a table."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from amusd.commands.simulate import simulate, simulate_text
from amusd.commands.simulate.inputs import inputs_of
from amusd.config import RunConfig
from amusd.console import Console
from amusd.errors import ConfigError
from amusd.settings import from_mapping
from amusd.simulation.calibration import Calibration
from amusd.simulation.cost import Costs, Duration, Shared
from experiments.closed_forms import best_synchronous, chain, synchronous

SMALL = {"num_answers": 2, "num_tokens": 100, "synchronous_lengths": [2, 4], "min_candidates": [0, 2, 3]}

LONG = {"num_answers": 1, "num_tokens": 2000, "synchronous_lengths": [4], "min_candidates": [2, 3]}


def configured(simulate: dict[str, Any] | None = None, **values: Any) -> RunConfig:
    given = {"accept": 0.7, "verify_ms": 20, "draft_ms": 2.5, "delay_ms": 0.05, "simulate": SMALL | (simulate or {})}
    return from_mapping(RunConfig, given | values)


def predicted(config: RunConfig, folder: Path) -> dict[str, Any]:
    console = Console(json_only=True, out=io.StringIO(), err=io.StringIO())
    return simulate(config, inputs_of(config), console, folder)


def test_rows_are_plain_every_length_every_wait_and_what_finds_its_own(tmp_path: Path) -> None:
    result = predicted(configured(fan_out=4), tmp_path)
    rows = result["rows"]
    assert [(row["mode"], row["num_speculative_tokens"], row["min_candidates"]) for row in rows] == [
        ("autoregressive", None, None),
        ("synchronous", 2, None),
        ("synchronous", 4, None),
        ("asynchronous", 2, None),
        ("asynchronous", 4, None),
        ("asynchronous", None, 2),
        ("asynchronous", None, 0),
        ("asynchronous", None, 2),
        ("asynchronous", None, 3),
        ("asynchronous", None, 2),
        ("asynchronous", None, 0),
        ("asynchronous", None, 2),
        ("asynchronous", None, 3),
        ("asynchronous", None, None),
    ]
    assert rows[0]["speedup"] == 1
    assert rows[0]["tokens_per_second"] == pytest.approx(50)
    policies = [None] * 3 + ["windowed"] * 2 + ["chain"] * 4 + ["branching"] * 4 + ["auto"]
    assert [row["policy"] for row in rows] == policies
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
    assert result["inputs"]["accept_next"] == 0.4
    assert result["inputs"]["costs"]["to_draft"]["mean_ms"] == pytest.approx(0.05)
    assert result["inputs"]["costs"]["tree_row_ms"] == pytest.approx(0.06 * 2.5)


def test_speed_ups_are_near_the_formulas(tmp_path: Path) -> None:
    config = configured(LONG, delay_ms=0, max_lookahead=64, max_verify_width=32, fan_out=1, rows_per_step=1)
    for row in predicted(config, tmp_path)["rows"]:
        if row["mode"] == "synchronous":
            assert row["speedup"] == pytest.approx(synchronous(0.7, 8, row["num_speculative_tokens"]), rel=0.02)
        elif row["policy"] == "chain":
            assert row["speedup"] == pytest.approx(chain(0.7, 8, row["min_candidates"], restart_loss=1), rel=0.02)


def test_the_same_configuration_gives_the_same_bytes(tmp_path: Path) -> None:
    config = configured({"jitter": 0.1, "grid": True, "grid_accepts": [0.5], "grid_ratios": [4]})
    texts = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        texts.append(json.dumps(predicted(config, tmp_path / name)))
    assert texts[0] == texts[1]
    first, second = ((tmp_path / name / "target.jsonl").read_bytes() for name in ("first", "second"))
    assert first == second


def test_the_map_names_the_winner_of_each_place(tmp_path: Path) -> None:
    places = {"grid": True, "grid_accepts": [0.0, 0.8], "grid_ratios": [2, 10], "min_candidates": [0, 3]}
    result = predicted(configured(places), tmp_path)
    cells = {(cell["accept"], cell["ratio"]): cell for cell in result["grid"]}
    assert set(cells) == {(0.0, 2.0), (0.0, 10.0), (0.8, 2.0), (0.8, 10.0)}
    for (accept, ratio), cell in cells.items():
        ranked = sorted(cell["speedups"].values(), reverse=True)
        assert cell["speedups"][cell["winner"]] == ranked[0]
        assert cell["margin"] == pytest.approx(ranked[0] / ranked[1] - 1)
        expected = best_synchronous(accept, ratio, [2, 4], overhead=0.005)[0]
        assert cell["speedups"]["synchronous"] == pytest.approx(expected, rel=0.06)
        assert set(cell["min_candidates"]) == {"chain", "branching"}
        assert set(cell["min_candidates"].values()) <= {0, 3}
        assert cell["window"] in (2, 4)
        assert cell["auto"] >= 0.9 * ranked[0]
    assert cells[0.8, 2.0]["speedups"]["chain"] > cells[0.8, 2.0]["speedups"]["synchronous"]
    assert cells[0.0, 2.0]["speedups"]["chain"] == 1
    assert cells[0.8, 10.0]["winner"] == "branching"


def test_a_map_over_batch_sizes_has_the_cells_of_runs_in_such_batches(tmp_path: Path) -> None:
    machine = {"knee_rows": 12, "sequence_ms": 0.1, "num_tokens": 40}
    alike = {"synchronous_lengths": [2, 4], "min_candidates": [0, 2]}
    places = {"grid": True, "grid_accepts": [0.8], "grid_batch_sizes": [1, 6]}
    result = predicted(configured(machine | alike | places), tmp_path)
    assert [(cell["batch_size"], cell["ratio"]) for cell in result["grid"]] == [(1, 8), (6, 8)]
    for cell in result["grid"]:
        one_size = predicted(configured(machine | alike | {"batch_size": cell["batch_size"]}, accept=0.8), tmp_path)
        best: dict[str, float] = {}
        for row in one_size["rows"]:
            name = row["policy"] or row["mode"]
            best[name] = max(best.get(name, 0.0), row["speedup"])
        assert cell.pop("auto") == best.pop("auto")
        assert cell["speedups"] == best
    assert result["grid"][0]["winner"] == "branching"
    text = simulate_text(result)
    assert "accept \\ batch size" in text
    assert "for each acceptance and number of answers at a time:" in text


def test_a_draft_without_probabilities_keeps_to_one_chain(tmp_path: Path) -> None:
    drafter = {"kind": "cascade", "model": "middle"}
    result = predicted(configured({"grid": True, "grid_accepts": [0.5], "grid_ratios": [5]}, drafter=drafter), tmp_path)
    assert "branching" not in {row["policy"] for row in result["rows"]}
    assert result["rows"][-1]["policy"] == "auto"
    assert result["rows"][-1]["fan_out"] is None
    (cell,) = result["grid"]
    assert set(cell["speedups"]) == {"autoregressive", "synchronous", "windowed", "chain"}


def test_in_the_map_a_row_costs_the_same_share_of_a_step_everywhere(tmp_path: Path) -> None:
    def gained(row_ms: float) -> float:
        tried = {"synchronous_lengths": [4], "min_candidates": [1]}
        places = {"grid": True, "grid_accepts": [0.8], "grid_ratios": [4], "draft_row_ms": row_ms, **tried}
        one_path = configured(places, draft_ms=1, delay_ms=0, verify_breadth=1)
        (cell,) = predicted(one_path, tmp_path)["grid"]
        return float(cell["speedups"]["branching"])

    # a step of one row takes 5 ms there, one of eight with rows of 0.1 of that 8.5 ms
    assert gained(0) > 1.1 * gained(0.1)


def test_what_a_tree_costs_and_brings_is_given_or_measured(tmp_path: Path) -> None:
    def inputs(simulate: dict[str, Any] | None = None, **values: Any) -> Any:
        unknown = {"accept": None, "verify_ms": None, "draft_ms": None, "delay_ms": None}
        return inputs_of(configured(simulate, **{**unknown, "calibration": str(tmp_path / "run"), **values})).simulator

    folder = run_directory(tmp_path / "run")
    tried = {"num_answers": 1, "num_tokens": 500, "synchronous_lengths": [4], "min_candidates": [2]}
    shown = configured({"draft_row_ms": 0.3, **tried}, policy="branching", drafter={"accept_next": 0.6})
    predicted(shown, folder)
    measured = inputs()
    assert measured.accept_next == pytest.approx(0.6, abs=0.15)
    assert measured.costs.tree_row_ns == pytest.approx(300_000, rel=0.01)
    assert {rows: shared.together.mean_ms for rows, shared in measured.costs.tree_steps.items()} == pytest.approx(
        {rows: 2.5 + 0.3 * (rows - 1) for rows in measured.costs.tree_steps}, rel=0.01
    )
    given = inputs({"draft_row_ms": 1.0})
    assert (given.costs.tree_row_ns, given.costs.tree_steps) == (1_000_000, {})
    faster = inputs(draft_ms=1.0)
    assert (faster.costs.tree_row_ns, faster.costs.tree_steps) == (60_000, {})
    assert inputs(accept=0.5, drafter={"accept_next": 0.2}).accept_next == 0.2


@pytest.mark.parametrize(("policy", "has_tree"), [("chain", False), ("auto", True)])
def test_the_events_are_of_the_configured_policy(tmp_path: Path, policy: str, has_tree: bool) -> None:
    predicted(configured(policy=policy), tmp_path)
    events = [json.loads(line) for line in (tmp_path / "draft.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {event["message"] for event in events if event["name"] == "send"} == {"candidate", "progress"}
    assert {event["fan_out"] > 1 for event in events if event["name"] == "draft_prefill"} == {has_tree}


def test_a_run_is_simulated_from_its_own_events(tmp_path: Path) -> None:
    long = {"num_tokens": 400, "min_candidates": [2]}
    first = predicted(configured(long), run_directory(tmp_path / "run"))
    config = configured(
        long, accept=None, verify_ms=None, draft_ms=None, delay_ms=None, calibration=str(tmp_path / "run")
    )
    again = predicted(config, run_directory(tmp_path / "again"))
    assert again["inputs"]["acceptance"]["kind"] == "replay"
    assert again["inputs"]["num_answers"] == 1
    for before, after in zip(first["rows"], again["rows"], strict=True):
        assert after["speedup"] == pytest.approx(before["speedup"], rel=0.15)  # one answer instead of two


def test_devices_apart_take_the_times_that_were_measured_while_the_other_worker_rested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes = {0: Shared(Duration.of_ms(20.0), Duration.of_ms(30.0))}
    costs = Costs(passes=passes, draft_token=Shared(Duration.of_ms(2.0), Duration.of_ms(3.0)))
    calibration = Calibration(costs, ((True, False),), "embedded")
    monkeypatch.setattr("amusd.commands.simulate.inputs.calibrate", lambda *_: calibration)
    known = {"verify_ms": None, "draft_ms": None, "calibration": "run"}
    shared, apart = (inputs_of(configured({"devices_apart": each}, **known)).simulator.costs for each in (False, True))
    assert (shared.passes, shared.draft_token) == (costs.passes, costs.draft_token)
    assert (apart.passes, apart.draft_token) == ({0: Shared.of_ms(20.0)}, Shared.of_ms(2.0))


def test_what_is_given_wins_over_what_was_measured(tmp_path: Path) -> None:
    predicted(configured(), run_directory(tmp_path / "run"))
    config = configured(
        {"overhead_ms": 3, "row_ms": 0.5}, accept=None, draft_ms=None, delay_ms=None, verify_ms=40,
        calibration=str(tmp_path / "run"),
    )  # fmt: skip
    costs = inputs_of(config).simulator.costs
    assert costs.passes[0].alone.mean_ms == 40
    assert costs.draft_token.alone.mean_ms == pytest.approx(2.5)
    assert costs.host.together.mean_ms == 3
    assert costs.row_ns == 500_000
    assert inputs_of(configured(calibration=str(tmp_path / "run"))).acceptance == {"kind": "drawn", "accept": 0.7}


def run_directory(path: Path) -> Path:
    """The events folder of a run directory."""
    (path / "events").mkdir(parents=True)
    return path / "events"


def test_the_table_has_one_line_for_each_schedule_and_says_what_it_means_and_what_to_use(tmp_path: Path) -> None:
    result = predicted(configured({"grid": True, "grid_accepts": [0.6], "grid_ratios": [4, 8]}), tmp_path)
    rows, legend, places, meaning, advice = simulate_text(result).split("\n\n")
    lines = rows.splitlines()
    assert [line.partition("  ")[0] for line in lines[2:]] == [
        "autoregressive",
        *["synchronous, 2 tokens", "synchronous, 4 tokens", "windowed, 2 tokens", "windowed, 4 tokens"],
        *["chain, waits for 2", "chain, waits for 0", "chain, waits for 3"],
        *["branching, waits for 2", "branching, waits for 0", "branching, waits for 3"],
        "auto",
    ]
    assert "(" not in rows
    chosen = {line.partition("  ")[0]: line.rpartition("%")[2].strip() for line in lines[2:]}
    assert "configured" in chosen["chain, waits for 2"]
    assert "configured" in chosen["branching, waits for 2"]
    assert sum("best" in choice for choice in chosen.values()) == 4
    assert (chosen["autoregressive"], chosen["auto"]) == ("", "")
    for name in ("tokens", "waits for", "chosen", "accepted", "tokens/pass", "idle t/d", "wasted"):
        assert f"{name}:" in legend
    assert places.splitlines()[0].split() == ["accept", "\\", "verify/draft", "4", "8"]
    assert places.splitlines()[2].startswith("0.6 ")
    assert meaning.startswith("for each acceptance")
    assert len(legend.splitlines()) == 3
    assert advice.startswith("Use mode=asynchronous policy=")
    assert "times as fast as plain decoding" in advice


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


def test_no_more_answers_are_simulated_than_tell_the_speed(tmp_path: Path) -> None:
    tried = {"synchronous_lengths": [2], "min_candidates": [0], "num_answers": 64}
    result = predicted(configured(tried), tmp_path)
    number = result["inputs"]["num_answers"]
    assert 4 <= number < 64
    assert result["rows"][-1]["relative_error"] <= 0.015
    short = predicted(configured(tried | {"num_tokens": 12}), tmp_path)
    assert short["inputs"]["num_answers"] > number
    batch = predicted(configured(tried | {"num_tokens": 12, "batch_size": 48}), tmp_path)
    assert batch["inputs"]["num_answers"] >= 48


def test_batches_share_passes_and_are_compared_with_plain_batches(tmp_path: Path) -> None:
    one, four = (
        predicted(configured({"batch_size": size, "num_answers": 4, "row_ms": 1, "sequence_ms": 0.5}), tmp_path)
        for size in (1, 4)
    )
    plain, best, *_ = (row for row in four["rows"] if row["choice"] != "tried")
    assert plain["speedup"] == 1
    assert plain["tokens_per_second"] == pytest.approx(4 * 1000 / (20 + 3 * 1.5))
    assert plain["mean_latency_ms"] == pytest.approx(100 * 24.5)
    assert best["speedup"] == pytest.approx(best["tokens_per_second"] / plain["tokens_per_second"])
    assert best["speedup"] < max(row["speedup"] for row in one["rows"] if row["mode"] == "synchronous")
    assert (one["inputs"]["batch_size"], four["inputs"]["batch_size"]) == (1, 4)
    costs = four["inputs"]["costs"]
    assert (costs["row_ms"], costs["sequence_ms"], costs["draft_sequence_ms"], costs["knee_rows"]) == (1, 0.5, 0, None)
    head, _, header = simulate_text(four).splitlines()[:3]
    assert head.startswith("4 answers at a time: tokens/s of all together, s/answer of each")
    assert header.split() == [*simulate_text(one).splitlines()[0].split()[:-1], "s/answer", "chosen"]


def test_there_are_as_many_drawn_answers_as_a_batch_has_places(tmp_path: Path) -> None:
    few = {"synchronous_lengths": [4], "min_candidates": [2], "num_tokens": 20}
    inputs = predicted(configured(few | {"batch_size": 6, "num_answers": 2}), tmp_path)["inputs"]
    assert (inputs["num_answers"], inputs["batch_size"]) == (6, 6)


def test_a_replay_fills_no_more_places_than_it_has_answers(tmp_path: Path) -> None:
    predicted(configured(), run_directory(tmp_path / "run"))  # its events are those of one answer
    config = configured({"batch_size": 3, "knee_rows": 2}, accept=None, calibration=str(tmp_path / "run"))
    result = predicted(config, run_directory(tmp_path / "again"))
    assert result["inputs"]["batch_size"] == 1
    assert result["inputs"]["costs"]["knee_rows"] == 2


MISTAKES = [
    ({"accept": None, "verify_ms": 1.0}, "accept: required to simulate without calibration=RUN_DIR"),
    ({"draft_ms": None}, "draft_ms: required to simulate without calibration=RUN_DIR"),
    ({"simulate": {"devices_apart": True}}, "simulate.devices_apart=true: needs calibration=RUN_DIR"),
    ({"verify_ms": 0}, "verify_ms=0.0: must be above 0"),
    ({"draft_ms": -1}, "draft_ms=-1.0: must be above 0"),
    ({"delay_ms": -1}, "delay_ms=-1.0: must be at least 0"),
    ({"delay_ms": float("inf")}, "delay_ms=inf: must be at least 0"),
    ({"policy": "/proc/nowhere.py:make"}, "policy=/proc/nowhere.py:make: "),
    ({"max_lookahead": 2}, "simulate.min_candidates=3: must be at most max_lookahead (2)"),
    ({"max_verify_width": 4}, "max_verify_width=4: must be at least 5: 4 candidates"),
    ({"calibration": "/proc/nowhere"}, "calibration=/proc/nowhere: its events/ show no draft token"),
    ({"simulate": {"num_tokens": 0}}, "simulate.num_tokens=0: must be at least 1"),
    ({"simulate": {"jitter": 0.6}}, "simulate.jitter=0.6: must be between 0 and 0.5"),
    ({"simulate": {"batch_size": 0}}, "simulate.batch_size=0: must be at least 1"),
    ({"simulate": {"batch_size": 2, "grid": True}}, "simulate.batch_size=2: must be 1 with simulate.grid=true"),
    ({"simulate": {"grid_batch_sizes": [2]}}, "simulate.grid_batch_sizes=[2]: needs simulate.grid=true"),
    ({"simulate": {"grid": True, "grid_batch_sizes": [0]}}, "simulate.grid_batch_sizes=[0]: each must be at least 1"),
    ({"simulate": {"knee_rows": 0}}, "simulate.knee_rows=0: must be at least 1"),
    ({"simulate": {"row_ms": -1}}, "simulate.row_ms=-1.0: must be at least 0"),
    ({"simulate": {"sequence_ms": float("nan")}}, "simulate.sequence_ms=nan: must be at least 0"),
    ({"simulate": {"draft_sequence_ms": -1}}, "simulate.draft_sequence_ms=-1.0: must be at least 0"),
    ({"simulate": {"draft_row_ms": -1}}, "simulate.draft_row_ms=-1.0: must be at least 0"),
    ({"simulate": {"overhead_ms": -1}}, "simulate.overhead_ms=-1.0: must be at least 0"),
    ({"simulate": {"synchronous_lengths": []}}, "simulate.synchronous_lengths=[]: name at least one"),
    ({"simulate": {"min_candidates": [-1]}}, "simulate.min_candidates=[-1]: name at least one, each at least 0"),
    ({"simulate": {"grid_accepts": [1.5]}}, "simulate.grid_accepts=[1.5]: name at least one, each between 0 and 1"),
    ({"simulate": {"grid_ratios": [0.9]}}, "simulate.grid_ratios=[0.9]: name at least one, each at least 1"),
]


@pytest.mark.parametrize(("values", "message"), MISTAKES, ids=[message.split(":")[0] for _, message in MISTAKES])
def test_a_mistake_is_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        inputs_of(configured(values.pop("simulate", None), **values))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
