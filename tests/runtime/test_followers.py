"""The processes of the target's other ranks: what the first rank hears of one that ends before it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from amusd.config import EngineConfig, HardwareConfig
from amusd.errors import RankLostError
from amusd.runtime import followers as module
from amusd.runtime.followers import Followers
from tests.warm import ROOT

PROGRAM = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from amusd.runtime import followers, startup

def run_follower(_config, rank, meeting):
    time.sleep(600)

startup.run_follower = run_follower
followers.main()
"""
SECONDS = 60.0


def started() -> Followers:
    """Ranks 1 and 2, without a model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "command_of", lambda _: [sys.executable, "-c", PROGRAM])
        return Followers(EngineConfig(target_tensor_parallel_size=3, hardware=HardwareConfig(devices=("cpu",) * 4)))


def test_one_that_is_killed_is_named_and_the_others_are_ended_with_their_folder() -> None:
    followers = started()
    one, other = followers.pids
    assert followers.failure(1, 0.0) is None
    os.kill(one, signal.SIGKILL)
    failure = followers.failure(1, SECONDS)
    assert isinstance(failure, RankLostError)
    assert str(failure).startswith(f"rank 1 of the target (pid {one}) was killed by signal 9; ")
    followers.stop()
    assert not Path(f"/proc/{other}").exists()
    assert not Path(followers.address).exists()


def test_their_folder_goes_with_a_first_rank_that_is_killed() -> None:
    program = "from runtime.test_followers import started; print(started().address, flush=True); input()"
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
