"""Which device each rank gets, for every small machine."""

from __future__ import annotations

import itertools

import pytest

from amusd.config import DrafterConfig, EngineConfig
from amusd.runtime.placement import gpu_number, place, sharing

CASES = list(itertools.product(range(9), range(1, 5)))
"""GPUs, ranks of the target."""


def gpus(devices: tuple[str, ...]) -> list[int]:
    return [gpu_number(device) for device in devices]


def engine(num_target_ranks: int = 1, *, drafter: str = "embedded") -> EngineConfig:
    return EngineConfig(
        drafters=(DrafterConfig(kind=drafter),),  # type: ignore[arg-type]  # a parameter's type
        target_tensor_parallel_size=num_target_ranks,
    )


@pytest.mark.parametrize(
    ("num_gpus", "num_target", "devices"),
    [
        (0, 1, ["cpu", "cpu"]),
        (1, 1, ["cuda:0", "cuda:0"]),
        (2, 1, ["cuda:0", "cuda:1"]),
        (8, 1, ["cuda:0", "cuda:1"]),
        (1, 2, ["cuda:0", "cuda:0", "cuda:0"]),
        (2, 2, ["cuda:0", "cuda:1", "cuda:1"]),
        (3, 2, ["cuda:0", "cuda:1", "cuda:2"]),
        (2, 4, ["cuda:0", "cuda:0", "cuda:1", "cuda:1", "cuda:1"]),
        (8, 4, ["cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4"]),
    ],
)
def test_the_target_comes_first_and_the_draft_shares_the_last_gpu(
    num_gpus: int, num_target: int, devices: list[str]
) -> None:
    assert list(place(num_gpus, num_target)) == devices


def test_with_fewer_gpus_than_ranks_all_are_used_and_no_role_shares_more_than_it_must() -> None:
    for num_gpus, num_target in CASES:
        if not 0 < num_gpus < num_target + 1:
            continue
        devices = gpus(place(num_gpus, num_target))
        assert set(devices) == set(range(num_gpus))
        for own in (devices[:num_target], devices[num_target:]):
            assert own == sorted(own)
            counts = [own.count(number) for number in set(own)]
            assert max(counts) - min(counts) <= 1
            assert len(counts) == min(len(own), num_gpus)
        assert devices[0] == 0
        assert devices[-1] == num_gpus - 1


def test_a_role_with_a_machine_of_its_own_has_its_first_gpus() -> None:
    for num_gpus, num_target in CASES:
        for num_draft_gpus in range(3):
            *targets, draft = place(num_gpus, num_target, num_draft_gpus)
            assert draft == ("cuda:0" if num_draft_gpus else "cpu")
            assert targets == list(place(num_gpus, num_target)[:-1])
            assert num_gpus == 0 or set(gpus(tuple(targets))) == set(range(min(num_gpus, num_target)))


@pytest.mark.parametrize(
    ("num_gpus", "num_target", "line"),
    [
        (1, 1, "target and draft share cuda:0"),
        (2, 2, "1 of 2 ranks of the target and draft share cuda:1"),
        (1, 2, "2 of 2 ranks of the target and draft share cuda:0"),
    ],
)
def test_it_is_said_who_shares(num_gpus: int, num_target: int, line: str) -> None:
    assert sharing(engine(num_target), place(num_gpus, num_target)) == line


def test_a_draft_without_a_model_shares_nothing() -> None:
    assert sharing(engine(drafter="ngram"), ("cuda:0", "cuda:0")) is None
