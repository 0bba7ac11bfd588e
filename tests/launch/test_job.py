"""What a rank is told, and what it refuses, before any process or model is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from amusd.config import RunConfig, SamplingParams
from amusd.errors import ConfigError
from launch.job import Job, Options
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
        run_directory=Path("/runs/a b"),
        command="compare",
        outcome_file=Path("/tmp/code"),
        roles="some.module",
        incarnation=2,
        overrides=("prompt=--run-directory=x, -m", "max_lookahead=4"),
    )
    assert Options.parse(options.arguments()) == options
    assert Options.parse(["prompt=hi"]) == Options(overrides=("prompt=hi",))


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_a_sweep_under_torchrun_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=r"^-m: a sweep starts a pair of workers per job"):
        Options.parse(["max_lookahead=1,2", flag])


def test_a_command_that_has_no_workers_is_refused_under_torchrun() -> None:
    with pytest.raises(ConfigError, match=r"^doctor: under torchrun the command is generate or compare$"):
        Options.parse(["doctor"])


def test_a_job_survives_the_way_through_the_store() -> None:
    config = RunConfig(prompt="'${x}'\n", sampling=SamplingParams(stop=("a",)))
    job = Job(command="generate", config=config, run_directory=Path("/runs/x"))
    assert Job.from_text(job.to_text()) == job


def test_a_process_that_torchrun_did_not_start_is_told_how_to(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="start it with torchrun --standalone --nproc-per-node=2"):
        place_from_environment()


@pytest.mark.parametrize("world_size", [1, 3])
def test_any_other_number_of_ranks_than_two_is_refused(monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    for name, value in {**TORCHRUN, "WORLD_SIZE": str(world_size)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^WORLD_SIZE={world_size}: this version runs on exactly 2 ranks"):
        place_from_environment()


def test_rank_0_serves_the_store_only_when_torchrun_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert not place_from_environment().hosts_store
    monkeypatch.setenv("RANK", "0")
    assert not place_from_environment().hosts_store
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert place_from_environment().hosts_store
