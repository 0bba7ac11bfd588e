"""The processes of the target's other ranks: what the first rank hears of one that ends before it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from amusd.config import EngineConfig, HardwareConfig, TargetConfig
from amusd.errors import PeerFailedError, RankLostError
from amusd.runtime.followers import Followers
from tests.warm import ROOT

WORK = "tests.runtime.follower_work"
SECONDS = 60.0


def started(what: str, work: str = WORK) -> Followers:
    target, hardware = TargetConfig(kind="hf", model=what), HardwareConfig(devices=("cpu",) * 4)
    return Followers(EngineConfig(target=target, target_tensor_parallel_size=3, hardware=hardware), [0], work)


@pytest.mark.parametrize(
    ("what", "work", "code", "reason"),
    [("crash", WORK, 1, "ValueError: a bug"), ("exit", WORK, 7, ""), ("", "tests.none", 1, "ModuleNotFoundError")],
)
def test_the_first_rank_hears_that_another_has_failed(
    capfd: pytest.CaptureFixture[str], what: str, work: str, code: int, reason: str
) -> None:
    followers = started(what or "x", work)
    failure = followers.failure(SECONDS)
    followers.stop()
    assert isinstance(failure, PeerFailedError)
    assert re.fullmatch(rf"rank \d of the target \(pid \d+\) failed with exit code {code}, .*", str(failure))
    assert reason in capfd.readouterr().err


def test_one_that_is_killed_is_named_and_the_others_are_ended_with_their_folder() -> None:
    followers = started("wait")
    one, other = followers.pids
    assert followers.failure() is None
    os.kill(one, signal.SIGKILL)
    for _ in range(2):
        failure = followers.failure(SECONDS)
        assert isinstance(failure, RankLostError)
        assert str(failure) == f"rank 1 of the target (pid {one}) was killed by signal 9"
    followers.stop()
    assert followers.failure() is None
    assert not Path(f"/proc/{other}").exists()
    assert not Path(followers.meeting.address).exists()


def test_their_folder_goes_with_a_first_rank_that_is_killed() -> None:
    program = "from runtime.test_followers import started; print(started('wait').meeting.address, flush=True); input()"
    path = {"PYTHONPATH": os.pathsep.join(str(folder) for folder in (ROOT, ROOT / "tests"))}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, env={**os.environ, **path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        folder = Path(first.stdout.readline().strip())
        assert folder.is_dir()
        first.kill()
    deadline = time.monotonic() + SECONDS
    while folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
