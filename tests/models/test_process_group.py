"""How ranks sum and join over NCCL, with a double of it. gloo itself is in test_ranks.py, NCCL itself in tests/gpu."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from models.fake_nccl import FakeNccl, Table
from torch import Tensor

from amusd.errors import RankLostError
from amusd.models import process_group
from amusd.models.meeting import Meeting
from amusd.models.process_group import ProcessGroup
from amusd.transport.torch_distributed import Backend

SIZE = 3


Groups = Callable[[Backend], list[ProcessGroup]]


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Groups]:
    """Makes `SIZE` ranks that have met."""
    ranks: list[ProcessGroup] = []

    def make(backend: Backend) -> list[ProcessGroup]:
        if backend == "nccl":
            table = Table(SIZE)
            monkeypatch.setattr(process_group, "_make", lambda _file, rank, *_: FakeNccl(table, rank))
        ranks.extend(ProcessGroup(rank, SIZE, Meeting(str(tmp_path)), backend) for rank in range(SIZE))
        with ThreadPoolExecutor(SIZE) as pool:
            list(pool.map(lambda rank: rank.meet("cpu"), ranks))
        return ranks

    yield make
    for rank in ranks:
        rank.abort()


def on_each(ranks: list[ProcessGroup], exchange: str, parts: list[Tensor]) -> list[Tensor]:
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(lambda rank: getattr(ranks[rank], exchange)(parts[rank]), range(SIZE)))


def random_parts(rows: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn((rows, 24), generator=generator).to(dtype) for _ in range(SIZE)]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_parts_are_added_in_the_order_of_ranks_over_every_backend(groups: Groups, backend: Backend) -> None:
    ranks, parts = groups(backend), random_parts(8, torch.float32)
    expected = (parts[0].float() + parts[1].float()) + parts[2].float()
    other_order = (parts[2].float() + parts[1].float()) + parts[0].float()
    assert not torch.equal(other_order, expected), "these parts cannot show the order"
    assert all(torch.equal(total, expected) for total in on_each(ranks, "sum", parts))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_joined_columns_stand_side_by_side_in_the_order_of_ranks(groups: Groups, backend: Backend) -> None:
    ranks, parts = groups(backend), random_parts(5)
    assert all(torch.equal(joined, torch.cat(parts, dim=1)) for joined in on_each(ranks, "join", parts))


def test_an_exchange_over_an_aborted_group_is_a_lost_rank(monkeypatch: pytest.MonkeyPatch, groups: Groups) -> None:
    def aborted(*_: object) -> None:
        raise RuntimeError("NCCL communicator was aborted on rank 1.\nand a trace")

    ranks = groups("nccl")
    monkeypatch.setattr(FakeNccl, "_allgather_base", aborted)
    message = r"^the ranks of the target have lost each other: NCCL communicator was aborted on rank 1\.$"
    for exchange in ("sum", "join"):
        with pytest.raises(RankLostError, match=message):
            getattr(ranks[0], exchange)(random_parts(1)[0])
