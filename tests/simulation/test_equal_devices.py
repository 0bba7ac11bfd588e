"""What the draft's device is worth: as a draft, as a rank, as a replica."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from amusd.commands.simulate import simulate, simulate_text
from amusd.commands.simulate.equal_devices import worth
from amusd.commands.simulate.inputs import inputs_of
from amusd.config import RunConfig
from amusd.console import Console
from amusd.settings import from_mapping
from amusd.simulation.cost import Costs, Duration, Shared
from amusd.simulation.simulator import Simulator
from amusd.simulation.tokens import drawn_answers

SMALL = {"num_answers": 2, "num_tokens": 40, "synchronous_lengths": [2, 4], "min_candidates": [1]}


def configured(accept: float = 0.7, draft_ms: float = 2.5, **simulate: Any) -> RunConfig:
    given = {"accept": accept, "verify_ms": 20, "draft_ms": draft_ms, "simulate": SMALL | simulate}
    return from_mapping(RunConfig, given)


def predicted(config: RunConfig, folder: Path) -> dict[str, Any]:
    console = Console(json_only=True, out=io.StringIO(), err=io.StringIO())
    return simulate(config, inputs_of(config), console, folder)


@pytest.mark.parametrize(
    ("rank_speedup", "number", "expected"),
    [(1.6, 8, 1.6**0.17), (2.0, 4, 5 / 4)],
)
def test_the_law_of_ranks(tmp_path: Path, rank_speedup: float, number: int, expected: float) -> None:
    result = predicted(configured(rank_speedup=rank_speedup, num_target_devices=number), tmp_path)
    assert result["equal_devices"]["pass_speedup"] == pytest.approx(expected, rel=1e-3)
    assert of("rank", result)[0] == pytest.approx(50 * expected, rel=1e-3)


def of(use: str, result: dict[str, Any]) -> list[float]:
    return [row["tokens_per_second"] for row in result["equal_devices"]["rows"] if row["use"] == use]


def test_a_rank_speeds_up_passes_and_a_draft_is_auto(tmp_path: Path) -> None:
    result = predicted(configured(rank_speedup=1.6), tmp_path)
    found, rows = result["equal_devices"], result["rows"]
    assert of("rank", result)[0] == pytest.approx(50 * 1.6)
    blocks = [row["tokens_per_second"] for row in rows if row["mode"] == "synchronous"]
    for split, alone, length in zip(of("rank", result)[1:], blocks, (2, 4), strict=True):
        assert split == pytest.approx(alone * (20 + 2.5 * length) / (20 / 1.6 + 2.5 * length), rel=0.02)
    (auto,) = (row["tokens_per_second"] for row in rows if row["policy"] == "auto")
    assert of("draft", result) == [auto]
    assert of("replica", result) == pytest.approx([50, *blocks])  # one answer: the other engine has none
    speedups = found["speedups"]
    assert speedups["rank"] == pytest.approx(max(of("rank", result)) / 50)
    assert found["gain"] == pytest.approx(speedups["draft"] / max(speedups["rank"], speedups["replica"]) - 1)
    assert "as a replica" in simulate_text(result)


def test_replicas_disturb_each_other_as_the_workers_of_a_pair_do() -> None:
    passes = {0: Shared(Duration.of_ms(20.0), Duration.of_ms(25.0))}
    costs = Costs(passes=passes, draft_token=Shared(Duration.of_ms(2.0), Duration.of_ms(3.0)))
    assert costs.where_other(works=True) == Costs(passes={0: Shared.of_ms(25.0)}, draft_token=Shared.of_ms(3.0))
    assert costs.where_other(works=False) == Costs(passes={0: Shared.of_ms(20.0)}, draft_token=Shared.of_ms(2.0))
    answers = drawn_answers(0.7, num_answers=2, num_tokens=60, seed=3)
    machine = Simulator(costs=costs, answers=answers, max_candidates=64, batch_size=2)
    config = configured()
    found = worth(1.0, 1, machine, config.decoding(), 2, 4)
    plain = {row["use"]: row["tokens_per_second"] for row in found["rows"] if row["mode"] == "autoregressive"}
    assert plain == pytest.approx({"rank": 2 * 50, "replica": 2 * 40})
    assert found["gain"] == pytest.approx(found["speedups"]["draft"] / found["speedups"]["rank"] - 1)
    apart = replace(
        machine, costs=Costs(passes={0: Shared.of_ms(20)}, draft_token=Shared.of_ms(2), sequence_ns=4000000)
    )
    found = worth(1.0, 1, apart, config.decoding(), 2)
    assert found["speedups"]["rank"] < found["speedups"]["replica"]
    assert found["gain"] == pytest.approx(found["speedups"]["draft"] / found["speedups"]["replica"] - 1)
