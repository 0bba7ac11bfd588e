"""A lost rank is found at once: while the device hangs (doubles of NCCL), and where a process is killed (gloo)."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from models.fake_nccl import HangingNccl
from models.linked_ranks import DEADLINE_SECONDS, come, lead
from models.rank_process import announce_pass

from amusd.errors import RankLostError
from amusd.models import process_group
from amusd.models.meeting import Meeting
from amusd.models.process_group import EXCHANGE_SECONDS, ProcessGroup
from amusd.models.sharding import Ranks
from amusd.runtime.ranks import Leader
from tests.launch.processes import environment
from tests.warm import Popen

assert DEADLINE_SECONDS < EXCHANGE_SECONDS, "what is found by a deadline would pass for what is found at once"
PROCESS = Path(__file__).with_name("rank_process.py")


@pytest.fixture(autouse=True)
def _no_watch_is_left() -> Iterator[None]:
    yield
    left = [thread for thread in threading.enumerate() if thread.name == "amusd-rank-watch"]
    assert not left


def await_pass(ranks: Ranks, has_ended: Callable[[], bool]) -> None:
    """Wait as the end of a pass is waited for on a device."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not has_ended():
        assert time.monotonic() < deadline, "nobody has noticed"
        ranks.check()
        time.sleep(0.001)
    ranks.check()


def test_an_abort_that_waits_for_graphs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_group, "ABORT_SECONDS", 0.05)
    at_exit: list[object] = []
    monkeypatch.setattr(process_group.atexit, "register", lambda function, *_: at_exit.append(function))
    graphs_destroyed = threading.Event()
    monkeypatch.setattr(process_group, "_make", lambda *_: HangingNccl(graphs_destroyed))
    group = ProcessGroup(0, 1, Meeting(str(tmp_path)), "nccl")
    group.meet("cpu")
    group.abort()
    assert group._watch.is_alive()
    assert at_exit == [group._watch.join], "an interpreter that ends must not be returned to"
    graphs_destroyed.set()
    group._watch.join(DEADLINE_SECONDS)


@contextmanager
def hanging_pair(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[tuple[Leader, list[HangingNccl]]]:
    """A leader, a follower that goes after its first command, and their groups, whose exchanges never end."""
    groups: list[HangingNccl] = []

    def make(*_: object) -> HangingNccl:
        groups.append(HangingNccl())
        return groups[-1]

    def follow() -> None:
        follower = come(folder, 1, 2, "nccl")
        follower.ready("cpu", DEADLINE_SECONDS)
        next(follower.commands())
        follower.close()

    monkeypatch.setattr(process_group, "_make", make)
    leader = lead(folder, 2, "nccl")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(follow)
        try:
            leader.await_followers("cpu", DEADLINE_SECONDS)
            yield leader, groups
        finally:
            leader.close()


def test_a_follower_that_goes_while_the_device_hangs_is_named_and_the_kernels_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with hanging_pair(monkeypatch, tmp_path) as (leader, groups):
        leader.check()
        announce_pass(leader)
        leader.sum(torch.ones(1, 1))  # returns at once: the device hangs, not the host
        with pytest.raises(RankLostError, match=r"^rank 1 of the target is gone$"):
            await_pass(leader, lambda: False)
        assert all(group.kernels_ended.wait(DEADLINE_SECONDS) for group in groups)
        with pytest.raises(RankLostError):
            await_pass(leader, lambda: True)  # the device has ended with numbers that mean nothing
    assert [group.num_aborts for group in groups] == [1, 1]


@contextmanager
def dying(folder: Path, kind: str) -> Iterator[None]:
    """A rank that is a process and kills itself."""
    process = Popen([sys.executable, str(PROCESS), str(folder), kind], env=environment(), stderr=subprocess.PIPE)
    try:
        yield
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == -signal.SIGKILL


def test_a_follower_that_is_killed_amid_a_pass_is_named(tmp_path: Path) -> None:
    leader = lead(tmp_path, 2)
    with dying(tmp_path, "follower"), ThreadPoolExecutor(1) as pool:
        leader.await_followers("cpu", DEADLINE_SECONDS)
        assert not leader.captures
        announce_pass(leader)
        assert leader.sum(torch.ones(1, 1)).item() == 2
        for lose in (lambda: leader.sum(torch.ones(1, 1)), lambda: await_pass(leader, lambda: False)):
            with pytest.raises(RankLostError, match=r"^rank 1 of the target is gone$"):
                pool.submit(lose).result(DEADLINE_SECONDS)
        leader.close()


def test_a_leader_that_is_killed_amid_a_pass_is_noticed(tmp_path: Path) -> None:
    with dying(tmp_path, "leader"), ThreadPoolExecutor(1) as pool:
        follower = come(tmp_path, 1, 2)
        follower.ready("cpu", DEADLINE_SECONDS)
        commands = follower.commands()
        assert next(commands)
        assert follower.sum(torch.ones(1, 1)).item() == 2
        with pytest.raises(RankLostError, match=r"^the ranks of the target have lost each other: "):
            pool.submit(follower.sum, torch.ones(1, 1)).result(DEADLINE_SECONDS)
        with pytest.raises(RankLostError, match=r"^rank 0 of the target is gone$"):
            await_pass(follower, lambda: False)
        assert list(commands) == []
        follower.close()
