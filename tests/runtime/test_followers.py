"""The processes of the target's other ranks: what the first rank hears of one that ends before it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from amusd.config import EngineConfig, HardwareConfig
from amusd.errors import ConfigError, PeerFailedError, RankLostError
from amusd.runtime.followers import Followers

CONFIG = EngineConfig(target_tensor_parallel_size=3, hardware=HardwareConfig(devices=("cpu",) * 4))
WORK = "tests.runtime.follower_work"
SECONDS = 60.0


@pytest.mark.parametrize(
    ("address", "error", "line"),
    [
        ("refuse", ConfigError, "no such device"),
        ("crash", PeerFailedError, "rank 2 of the target failed: a bug"),
        ("exit", PeerFailedError, "rank 2 of the target failed: exit code 7, for the reason above"),
    ],
)
def test_the_first_rank_hears_why_another_cannot_go_on(address: str, error: type[Exception], line: str) -> None:
    followers = Followers(pytest.fail)
    followers.prepare(CONFIG, [0], WORK)
    assert followers.failure() is None
    followers.start(address)
    failure = followers.failure(SECONDS)
    assert (type(failure), str(failure)) == (error, line)
    followers.stop(0.0)


def test_one_that_cannot_even_load_its_work_has_failed(capfd: pytest.CaptureFixture[str]) -> None:
    followers = Followers(pytest.fail)
    followers.prepare(CONFIG, [0], "tests.runtime.there_is_none")
    failure = followers.failure(SECONDS)
    assert isinstance(failure, PeerFailedError)
    assert str(failure).endswith("of the target failed: exit code 1, for the reason above")
    followers.stop(0.0)
    assert "ModuleNotFoundError" in capfd.readouterr().err


@pytest.mark.parametrize("is_started", [False, True])
def test_one_that_is_killed_is_told_once_and_the_others_are_ended(is_started: bool) -> None:
    told: list[str] = []
    followers = Followers(told.append)
    followers.prepare(CONFIG, [0], WORK)
    if is_started:
        followers.start("wait")
    one, other = followers.pids
    os.kill(one, signal.SIGKILL)
    for _ in range(2):
        failure = followers.failure(SECONDS)
        assert (type(failure), str(failure)) == (RankLostError, "rank 1 of the target is gone")
    followers.stop(0.0)
    assert told == [f"rank 1 of the target (pid {one}) was killed by signal 9"]
    assert not Path(f"/proc/{other}").exists()


def test_the_wait_for_their_end_ends_with_the_first_that_fails() -> None:
    followers = Followers(pytest.fail)
    followers.prepare(CONFIG, [0], WORK)  # rank 1 waits, rank 2 refuses
    followers.start("refuse")
    failure = followers.await_end()
    assert (type(failure), str(failure)) == (ConfigError, "no such device")
    followers.stop(0.0)
