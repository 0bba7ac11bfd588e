"""Who looks after which rank, and what rank 0 refuses of those that have come."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import amusd
from amusd.errors import ConfigError
from launch.nodes import Member, await_members, ranks_of
from launch.run import main
from launch.store import Place


@pytest.mark.parametrize(
    ("num_processes", "num_ranks", "shares"),
    [
        (2, 1, [range(1), range(0)]),
        (2, 3, [range(3), range(0)]),  # rank 0 starts all of the target's
        (4, 3, [range(1), range(1, 2), range(2, 3), range(0)]),
        (3, 16, [range(8), range(8, 16), range(0)]),
    ],
)
def test_all_but_the_last_process_share_the_targets_ranks_evenly(
    num_processes: int, num_ranks: int, shares: list[range]
) -> None:
    assert [ranks_of(rank, num_processes, num_ranks) for rank in range(num_processes)] == shares


@pytest.mark.parametrize(("num_processes", "num_ranks"), [(4, 2), (4, 4), (3, 1)])
def test_processes_that_cannot_share_them_are_refused(num_processes: int, num_ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"^target_tensor_parallel_size={num_ranks}: .* start {num_ranks + 1} in all"):
        ranks_of(0, num_processes, num_ranks)


def test_a_process_of_another_version_is_refused() -> None:
    class Told:
        def get(self, name: str, _timeout: float) -> dict[str, Any]:
            version = "0" if name == "here/2" else amusd.__version__
            return dataclasses.asdict(Member(num_gpus=1, amusd=version))

    place = Place(rank=0, size=3, apart=False, address="127.0.0.1", port=1, is_by_itself=False, namespace="t")
    with pytest.raises(ConfigError, match=f"^rank 2 has amusd 0, and rank 0 has {amusd.__version__}$"):
        await_members(place, Told(), 1.0)  # type: ignore[arg-type]  # what is asked of a store here


def test_a_target_on_several_machines_is_refused_in_one_line_that_says_what_is_possible(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("launch.run.raise_on_signals", lambda: None)
    assert main(["prompt=hi", "target_tensor_parallel_size=3", "transport.insecure=true"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("amusd: WORLD_SIZE=4 on several machines: a target has one machine")
    assert "--nnodes=2 --nproc-per-node=1" in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
