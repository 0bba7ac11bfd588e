"""A lost rank is found at once: while the device hangs (doubles of NCCL), and where a process is killed (gloo)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from models.fake_nccl import HangingNccl

from amusd.errors import RankLostError
from amusd.models import process_group
from amusd.models.kv_cache import KVMemory, PreallocatedCache
from amusd.models.passes import Part, Pass
from amusd.models.process_group import EXCHANGE_SECONDS, Watch
from amusd.models.ranks import Follower, Leader
from amusd.models.sharding import Ranks
from tests.warm import Popen

DEADLINE_SECONDS = 30.0
assert DEADLINE_SECONDS < EXCHANGE_SECONDS, "what is found by a deadline would pass for what is found at once"
PROCESS = Path(__file__).with_name("rank_process.py")


@pytest.fixture(autouse=True)
def _no_network() -> None:
    """Socket files are the subject here; nothing else connects."""


@pytest.fixture(autouse=True)
def _no_watch_is_left() -> Iterator[None]:
    yield
    left = [thread for thread in threading.enumerate() if thread.name == "amusd-rank-watch"]
    assert not left


def announce_pass(leader: Leader) -> None:
    part = Part(PreallocatedCache(KVMemory(1, torch.float32), capacity=1, allocated=1), [1])
    leader.announce([part], Pass([part]))


def await_pass(ranks: Ranks, has_ended: Callable[[], bool]) -> None:
    """Wait as the end of a pass is waited for on a device."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not has_ended():
        assert time.monotonic() < deadline, "nobody has noticed"
        ranks.check()
        time.sleep(0.001)
    ranks.check()


def test_the_end_of_a_socket_aborts_the_group_which_is_known_to_be_lost_before() -> None:
    own, other = socket.socketpair()
    lost_at_abort: list[bool] = []
    made = threading.Event()

    def abort() -> None:
        made.wait(DEADLINE_SECONDS)
        lost_at_abort.append(watch.is_lost)

    with own:
        watch = Watch([own.fileno()], abort)
        made.set()
        other.sendall(b"a command, which is for others to read")
        watch._thread.join(0.1)  # it would notice within that time if it listened to words
        assert watch._thread.is_alive()
        assert own.recv(100) == b"a command, which is for others to read"
        assert not watch.is_lost
        other.close()
        watch._thread.join(DEADLINE_SECONDS)
        assert lost_at_abort == [True]
        watch.end()
        watch.end()
    assert lost_at_abort == [True]


def test_an_abort_that_waits_for_graphs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "ABORT_SECONDS", 0.05)
    at_exit: list[object] = []
    monkeypatch.setattr(process_group.atexit, "register", lambda function, *_: at_exit.append(function))
    graphs_destroyed = threading.Event()
    own, other = socket.socketpair()
    with own, other:
        watch = Watch([own.fileno()], HangingNccl(graphs_destroyed).abort)
        watch.end()
        assert watch._thread.is_alive()
        assert at_exit == [watch._thread.join], "an interpreter that ends must not be returned to"
        graphs_destroyed.set()
        watch._thread.join(DEADLINE_SECONDS)


@contextmanager
def hanging_pair(
    monkeypatch: pytest.MonkeyPatch, life: Callable[[Follower], object]
) -> Iterator[tuple[Leader, list[HangingNccl], Future[object]]]:
    """A leader and a follower that are threads, over NCCL that never ends an exchange; and the groups they made."""
    groups: list[HangingNccl] = []
    both = threading.Barrier(2)

    def make(store: object, *_: object) -> HangingNccl:
        both.wait(DEADLINE_SECONDS)  # as real groups do: the leader removes the store's folder next
        groups.append(HangingNccl(store=store))
        return groups[-1]

    def follow() -> object:
        follower = Follower(leader.address, 1, 2, "nccl")
        follower.ready("cpu", DEADLINE_SECONDS)
        try:
            return life(follower)
        except BaseException as error:
            follower.close(error)
            raise
        finally:
            follower.close()

    monkeypatch.setattr(process_group, "_make", make)
    leader = Leader(2, "nccl")
    with ThreadPoolExecutor(1) as pool:
        followers = pool.submit(follow)
        try:
            leader.await_followers("cpu", DEADLINE_SECONDS)
            yield leader, groups, followers
        finally:
            leader.close()


def test_a_follower_that_goes_while_the_device_hangs_is_named_and_the_kernels_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with hanging_pair(monkeypatch, lambda follower: next(follower.commands())) as (leader, groups, _):
        leader.check()
        announce_pass(leader)
        leader.sum(torch.ones(1, 1))  # returns at once: the device hangs, not the host
        with pytest.raises(RankLostError, match=r"^rank 1 of the target is gone$"):
            await_pass(leader, lambda: False)
        assert all(group.kernels_ended.wait(DEADLINE_SECONDS) for group in groups)
        with pytest.raises(RankLostError):
            await_pass(leader, lambda: True)  # the device has ended with numbers that mean nothing
    assert [group.num_aborts for group in groups] == [1, 1]


def test_a_follower_whose_leader_goes_while_the_device_hangs_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    computing = threading.Event()

    def compute(follower: Follower) -> None:
        next(follower.commands())
        computing.set()
        await_pass(follower, lambda: False)

    with hanging_pair(monkeypatch, compute) as (leader, groups, follower):
        announce_pass(leader)
        assert computing.wait(DEADLINE_SECONDS)
        leader.close()
        error = follower.exception(DEADLINE_SECONDS)
    assert isinstance(error, RankLostError)
    assert str(error) == "rank 0 of the target is gone"
    assert all(group.kernels_ended.is_set() for group in groups)


def rank_process(*arguments: str) -> subprocess.Popen[str]:
    checkout = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, str(PROCESS), *arguments]
    return Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_a_follower_that_is_killed_amid_a_pass_is_named() -> None:
    leader = Leader(2)
    process = rank_process("follower", leader.address)
    try:
        leader.await_followers("cpu", DEADLINE_SECONDS)
        assert not leader.captures
        announce_pass(leader)
        assert leader.sum(torch.ones(1, 1)).item() == 2
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(leader.sum, torch.ones(1, 1))
            with pytest.raises(RankLostError, match=r"^rank 1 of the target is gone$"):
                second.result(DEADLINE_SECONDS)
        with pytest.raises(RankLostError, match=r"^rank 1 of the target is gone$"):
            await_pass(leader, lambda: False)
    finally:
        leader.close()
        process.kill()
        output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == -signal.SIGKILL
    assert not output
    assert not Path(leader.address).exists()


def test_a_leader_that_is_killed_amid_a_pass_is_noticed() -> None:
    process = rank_process("leader")
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    follower = Follower(address, 1, 2)
    try:
        follower.ready("cpu", DEADLINE_SECONDS)
        commands = follower.commands()
        assert next(commands).parts[0].token_ids == [1]
        assert follower.sum(torch.ones(1, 1)).item() == 2
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(follower.sum, torch.ones(1, 1))
            with pytest.raises(RankLostError, match=r"^the ranks of the target have lost each other: "):
                second.result(DEADLINE_SECONDS)
        with pytest.raises(RankLostError, match=r"^rank 0 of the target is gone$"):
            await_pass(follower, lambda: False)
        assert list(commands) == []
    finally:
        follower.close()
        process.kill()
        process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == -signal.SIGKILL
