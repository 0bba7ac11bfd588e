"""Which device each rank gets, for every small machine."""

from __future__ import annotations

import pytest

from amusd.config import DrafterConfig, EngineConfig
from amusd.runtime.placement import place, sharing


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
        (8, 0, ["cuda:0"]),  # a draft with a machine of its own
    ],
)
def test_the_target_comes_first_and_the_draft_shares_the_last_gpu(
    num_gpus: int, num_target: int, devices: list[str]
) -> None:
    assert list(place(num_gpus, num_target)) == devices


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
