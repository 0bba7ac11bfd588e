"""What the draft's device is worth: as a draft, as a rank, as a replica."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from amusd.commands.simulate import simulate, simulate_text
from amusd.commands.simulate.equal_devices import EqualDevices, worth
from amusd.commands.simulate.inputs import inputs_of
from amusd.config import RunConfig
from amusd.console import Console
from amusd.errors import ConfigError
from amusd.settings import from_mapping
from amusd.simulation.cost import Costs, Duration, Shared
from amusd.simulation.simulator import Simulator
from amusd.simulation.tokens import drawn_answers

SMALL = {"num_answers": 2, "num_tokens": 60, "synchronous_lengths": [2, 4], "min_candidates": [1]}


def configured(accept: float = 0.7, draft_ms: float = 2.5, **simulate: Any) -> RunConfig:
    given = {"accept": accept, "verify_ms": 20, "draft_ms": draft_ms, "simulate": SMALL | simulate}
    return from_mapping(RunConfig, given)


def predicted(config: RunConfig, folder: Path) -> dict[str, Any]:
    console = Console(json_only=True, out=io.StringIO(), err=io.StringIO())
    return simulate(config, inputs_of(config), console, folder)


@pytest.mark.parametrize(
    ("number", "speed", "expected"), [(1, 1.0, 1.6), (2, 1.0, 1.6**0.585), (1, 0.5, 1.6**0.585), (8, 1.0, 1.6**0.17)]
)
def test_the_law_of_ranks(number: int, speed: float, expected: float) -> None:
    devices = EqualDevices(rank_speedup=1.6, num_target_devices=number, draft_device_speed=speed)
    assert devices.pass_speedup == pytest.approx(expected, rel=1e-3)
    assert devices.draft_speedup == 1


def test_ranks_that_scale_perfectly_are_as_fast_as_they_are_many() -> None:
    assert EqualDevices(rank_speedup=2.0, num_target_devices=4).pass_speedup == pytest.approx(5 / 4)
    assert EqualDevices(rank_speedup=1.0, num_target_devices=4).pass_speedup == 1
    assert EqualDevices(rank_speedup=2.0, draft_rank_speedup=2.0, num_target_devices=3).draft_speedup == 4


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
    assert found["winner"] == max(speedups, key=lambda use: speedups[use])
    assert found["gain"] == pytest.approx(speedups["draft"] / max(speedups["rank"], speedups["replica"]) - 1)
    assert "as a replica" in simulate_text(result)


def test_several_answers_are_divided_among_replicas(tmp_path: Path) -> None:
    one = predicted(configured(num_answers=4, rank_speedup=1.6), tmp_path)
    two = predicted(configured(num_answers=4, rank_speedup=1.6, batch_size=2, sequence_ms=4.0), tmp_path)
    assert of("replica", two)[0] == pytest.approx(2 * of("replica", one)[0])
    assert of("rank", two)[0] == pytest.approx(2 * of("rank", one)[0] * 20 / 24)
    shared = predicted(configured(num_answers=5, rank_speedup=1.6, batch_size=5, num_target_devices=4), tmp_path)
    assert of("replica", shared)[0] == pytest.approx(5 / 4 * 4 * 50, rel=0.02)
    alike = predicted(configured(num_answers=4, rank_speedup=1.0, batch_size=2, sequence_ms=4.0), tmp_path)
    speedups = alike["equal_devices"]["speedups"]
    assert speedups["rank"] < speedups["replica"]
    assert alike["equal_devices"]["gain"] == pytest.approx(speedups["draft"] / speedups["replica"] - 1)


def test_replicas_disturb_each_other_as_the_workers_of_a_pair_do() -> None:
    passes = {0: Shared(Duration.of_ms(20.0), Duration.of_ms(25.0))}
    costs = Costs(passes=passes, draft_token=Shared(Duration.of_ms(2.0), Duration.of_ms(3.0)))
    assert costs.where_other(works=True) == Costs(passes={0: Shared.of_ms(25.0)}, draft_token=Shared.of_ms(3.0))
    assert costs.where_other(works=False) == Costs(passes={0: Shared.of_ms(20.0)}, draft_token=Shared.of_ms(2.0))
    answers = drawn_answers(0.7, num_answers=2, num_tokens=60, seed=3)
    machine = Simulator(costs=costs, answers=answers, max_candidates=64, batch_size=2)
    config = configured()
    found = worth(EqualDevices(rank_speedup=1.0), machine, config.simulate, config.decoding())
    plain = {row["use"]: row["tokens_per_second"] for row in found["rows"] if row["mode"] == "autoregressive"}
    assert plain == pytest.approx({"rank": 2 * 50, "replica": 2 * 40})
    assert found["gain"] == pytest.approx(found["speedups"]["draft"] / found["speedups"]["rank"] - 1)


def test_an_older_device_drafts_more_slowly_and_is_less_of_a_rank(tmp_path: Path) -> None:
    whole = predicted(configured(rank_speedup=1.6), tmp_path)
    half = predicted(configured(rank_speedup=1.6, draft_device_speed=0.5), tmp_path)
    slow = predicted(configured(draft_ms=5.0, rank_speedup=1.6), tmp_path)
    assert of("draft", half)[0] == pytest.approx(of("draft", slow)[0])
    assert of("rank", half)[0] == pytest.approx(50 * 1.6**0.585, rel=1e-3)
    assert of("rank", half)[0] < of("rank", whole)[0]


def test_the_map_goes_over_devices_and_says_which_use_wins(tmp_path: Path) -> None:
    config = configured(rank_speedup=1.6, grid=True, grid_accepts=[0.5, 0.8], grid_target_devices=[1, 8])
    result = predicted(config, tmp_path)
    cells = {(cell["accept"], cell["num_target_devices"]): cell for cell in result["grid"]}
    assert set(cells) == {(0.5, 1), (0.5, 8), (0.8, 1), (0.8, 8)}
    assert cells[0.8, 8]["winner"] == "draft"
    assert cells[0.8, 8]["gain"] > cells[0.8, 1]["gain"]
    assert "accept \\ target devices" in simulate_text(result)


def test_nothing_is_said_of_it_unasked(tmp_path: Path) -> None:
    result = predicted(configured(), tmp_path)
    assert "equal_devices" not in result


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank_speedup": 3.0}, "simulate.rank_speedup=3.0: must be between 0.5 and 2"),
        ({"draft_rank_speedup": 0.0}, "simulate.draft_rank_speedup=0.0: must be between 0.5 and 2"),
        ({"draft_device_speed": 0.0}, "simulate.draft_device_speed=0.0: must be above 0, and at most 1"),
        ({"num_target_devices": 0}, "simulate.num_target_devices=0: must be at least 1"),
        ({"grid_target_devices": [2]}, "simulate.grid_target_devices=[2]: needs simulate.grid=true and"),
        ({"grid": True, "grid_target_devices": [2]}, "simulate.grid_target_devices=[2]: needs simulate.grid=true and"),
    ],
)
def test_a_mistake_is_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(**values)
    assert str(caught.value).startswith(message)
