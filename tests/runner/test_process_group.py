"""Ranks sum and join, and notice at once that another is lost, over gloo and over a double of NCCL.

NCCL itself is in tests/gpu, ranks that are killed in tests/launch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from models.fake_nccl import DEADLINE_SECONDS as FAKE_SECONDS
from models.fake_nccl import FakeNccl
from models.linked_ranks import DEADLINE_SECONDS, come, lead, on_ranks
from torch import Tensor

from amusd.errors import RankLostError
from amusd.models.fused import add_parts
from amusd.models.kv_cache import KVCache, KVMemory
from amusd.models.passes import Prefill
from amusd.models.sharding import Ranks
from amusd.runner import process_group
from amusd.runner.process_group import EXCHANGE_SECONDS, MANY_ROWS, ProcessGroup, backend_for

assert DEADLINE_SECONDS < EXCHANGE_SECONDS, "what is found by a deadline would pass for what is found at once"


@pytest.fixture(autouse=True)
def _no_watch_is_left() -> Iterator[None]:
    yield
    for thread in [thread for thread in threading.enumerate() if thread.name == "amusd-rank-watch"]:
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive()


def test_nccl_connects_ranks_that_have_a_gpu_each() -> None:
    for device, backend in (("cuda:1", "nccl"), ("cuda:0", "gloo"), ("cpu", "gloo")):
        assert backend_for(("cuda:0", device)) == backend
    assert backend_for(("cpu", "cpu")) == "gloo"


@pytest.mark.parametrize("rows", [8, MANY_ROWS + 2])
def test_parts_are_added_and_joined_in_the_order_of_ranks(tmp_path: Path, rows: int) -> None:
    parts = torch.randn((3, rows, 24), generator=torch.Generator().manual_seed(8))

    def exchange(ranks: Ranks) -> tuple[Tensor, Tensor]:
        hidden, own = torch.ones((rows, 24)), ranks.own_rows(rows)
        add_parts(hidden[own], ranks.parts(parts[ranks.rank]))
        return ranks.whole(hidden[own], rows), ranks.join(parts[ranks.rank])

    first, second, third = parts
    expected = (first + second) + third + 1
    assert not torch.equal((third + second) + first + 1, expected), "these parts cannot show the order"
    for total, joined in on_ranks(tmp_path, 3, exchange):
        assert torch.equal(total, expected)
        assert torch.equal(joined, torch.cat((*parts,), dim=1))


def of_nccl(monkeypatch: pytest.MonkeyPatch, group: FakeNccl) -> tuple[ProcessGroup, Mock]:
    """A rank over a double of NCCL, and its link to another one."""
    monkeypatch.setattr(ProcessGroup, "_make", lambda *_: group)
    rank, link = ProcessGroup(0, 1, "nowhere", "nccl"), Mock(is_lost=False)
    rank._links[1] = link
    return rank, link


def test_an_exchange_over_an_aborted_group_is_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, _ = of_nccl(monkeypatch, FakeNccl())
    rank.form("cpu")
    aborted = Mock(side_effect=RuntimeError("NCCL communicator was aborted on rank 1.\nand a trace"))
    monkeypatch.setattr(FakeNccl, "_allgather_base", aborted)
    monkeypatch.setattr(FakeNccl, "alltoall_base", aborted)
    message = r"^the ranks of the target have lost each other: NCCL communicator was aborted on rank 1\.$"
    for exchange, rows in ((rank.parts, 1), (rank.parts, MANY_ROWS), (rank.join, 1)):
        with pytest.raises(RankLostError, match=message):
            exchange(torch.ones(rows, 1))
    rank.abort()


def test_an_abort_that_waits_for_graphs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "ABORT_SECONDS", 0.05)
    at_exit: list[object] = []
    monkeypatch.setattr(process_group.atexit, "register", lambda function, *_: at_exit.append(function))
    graphs_destroyed = threading.Event()
    group, _ = of_nccl(monkeypatch, FakeNccl(graphs_destroyed))
    group.form("cpu")
    group.abort()
    assert group._watch.is_alive()
    assert at_exit == [group._watch.join], "an interpreter that ends must not be returned to"
    graphs_destroyed.set()
    group._watch.join(DEADLINE_SECONDS)


def test_no_exchange_of_a_prompt_begins_once_a_rank_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs_destroyed = threading.Event()
    rank, link = of_nccl(monkeypatch, FakeNccl(graphs_destroyed))
    rank.form("cpu")

    def prefill() -> None:  # its end frees the graphs, for which the abort waits
        try:
            while True:
                rank.gather(torch.ones(1, 1))
        finally:
            graphs_destroyed.set()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(prefill)
        link.is_lost = True
        with pytest.raises(RankLostError, match=r"^a rank of the target is gone$"):
            done.result(FAKE_SECONDS / 2)
    rank.abort()


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_communicator_that_does_not_form_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, is_lost: bool) -> None:
    class Forming(FakeNccl):
        def _allgather_base(self, *_: object) -> None:
            ended.wait(FAKE_SECONDS)

    ended = threading.Event()
    rank, link = of_nccl(monkeypatch, Forming())
    link.is_lost = is_lost
    if not is_lost:
        monkeypatch.setattr(process_group, "EXCHANGE_SECONDS", 0.1)
    with ThreadPoolExecutor(1) as pool:
        reason = "a rank of the target is gone$" if is_lost else "did not meet: not within 0.1 s; .*NCCL_P2P_DISABLE=1"
        with pytest.raises(RankLostError, match=reason):
            pool.submit(rank.form, "cpu").result(FAKE_SECONDS / 2)
    rank.abort()
    ended.set()


def test_whatever_fails_while_ranks_meet_is_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, _ = of_nccl(monkeypatch, FakeNccl())
    monkeypatch.setattr(ProcessGroup, "_make", Mock(side_effect=TypeError("incompatible arguments\nand more")))
    with pytest.raises(RankLostError, match=r"did not meet: TypeError: incompatible arguments; NCCL_DEBUG.*_SOCKET"):
        rank.form("cpu")
    rank.abort()


def await_loss(ranks: Ranks) -> None:
    """Wait as the end of a pass is waited for on a device, here one that hangs."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        ranks.check()
        time.sleep(0.001)


def test_a_follower_that_goes_while_a_device_hangs_is_named_and_kernels_end(monkeypatch: Any, tmp_path: Path) -> None:
    groups = [FakeNccl(), FakeNccl()]
    monkeypatch.setattr(ProcessGroup, "_make", lambda rank, _device: groups[rank.rank])

    def follow() -> None:
        with closing(come(tmp_path, 1, 2, "nccl")) as follower:
            follower.ready("cpu", DEADLINE_SECONDS)
            next(follower.commands())

    with ThreadPoolExecutor(1) as pool, closing(lead(tmp_path, 2, "nccl")) as leader:
        pool.submit(follow)
        leader.await_followers("cpu", DEADLINE_SECONDS)
        leader.check()
        leader.announce(Prefill(KVCache(KVMemory(1, torch.float32), capacity=1, allocated=1), [1]), None)
        leader.gather(torch.ones(1, 1))  # returns at once: the device hangs, not the host
        with pytest.raises(RankLostError, match=r"^rank 1 of the target is gone$"):
            await_loss(leader)
        assert all(group.kernels_ended.wait(DEADLINE_SECONDS) for group in groups)
        with pytest.raises(RankLostError):
            leader.check()  # the device has ended with numbers that mean nothing
    assert [group.num_aborts for group in groups] == [1, 1]
