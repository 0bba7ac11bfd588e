"""What a rank is told, and what it refuses, before any process or model is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from amusd.config import RunConfig, SamplingParams
from amusd.errors import ConfigError
from launch.job import Group, Job, Options
from launch.store import place_from_environment

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_options_survive_the_way_through_a_command_line() -> None:
    options = Options(
        group_file=Path("/runs/a b"),
        command="compare",
        roles="some.module",
        overrides=("prompt=--group-file=x, -m", "max_lookahead=4"),
    )
    assert Options.parse(options.arguments()) == options
    assert Options.parse(["prompt=hi"]) == Options(overrides=("prompt=hi",))


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_a_sweep_under_torchrun_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=r"^-m: a sweep starts its own pairs of workers"):
        Options.parse(["max_lookahead=1,2", flag])


def test_a_group_survives_the_way_to_the_ranks() -> None:
    config = RunConfig(prompt="'${x}'\n", sampling=SamplingParams(stop=("a",)))
    jobs = tuple(Job(config=config, run_directory=Path(f"/runs/{n}"), title=f"job {n}") for n in range(2))
    group = Group(command="generate", jobs=jobs)
    assert Group.from_text(group.to_text()) == group


def test_a_process_that_torchrun_did_not_start_is_told_how_to(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="start it with torchrun --standalone --nproc-per-node=2"):
        place_from_environment()


def test_a_single_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TORCHRUN, "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"^WORLD_SIZE=1: at least 2 processes are needed"):
        place_from_environment()


@pytest.mark.parametrize(
    ("local_world_size", "rank", "apart", "is_away"), [(2, 1, False, False), (1, 0, True, False), (1, 1, True, True)]
)
def test_a_rank_that_is_alone_on_its_machine_is_apart_from_the_other(
    monkeypatch: pytest.MonkeyPatch, local_world_size: int, rank: int, apart: bool, is_away: bool
) -> None:
    for name, value in {**TORCHRUN, "LOCAL_WORLD_SIZE": str(local_world_size), "RANK": str(rank)}.items():
        monkeypatch.setenv(name, value)
    place = place_from_environment()
    assert (place.rank, place.apart, place.is_away) == (rank, apart, is_away)


def test_rank_0_serves_the_store_only_when_torchrun_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert not place_from_environment().is_by_itself
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert place_from_environment().is_by_itself
