"""The cores, threads and devices of each worker."""

from __future__ import annotations

import subprocess
import sys

import pytest

from amusd.config import HardwareConfig
from amusd.runtime.cores import allowed_cores, cores_for
from tests.launch.processes import environment


@pytest.mark.parametrize(
    ("allowed", "num_threads", "targets", "draft"),
    [
        ([2, 5, 7], 1, [{2}], {7}),
        ([0, 1, 2, 3], 2, [{0, 1}], {2, 3}),
        ([0], 1, [set()], set()),
        ([0, 1, 2], 2, [set()], set()),
        ([0, 1, 2, 3, 4, 5, 6], 2, [{0, 1}, {2, 3}], {5, 6}),
        ([0, 1, 2, 3, 4], 2, [set(), set()], set()),
    ],
)
def test_each_rank_and_the_draft_have_cores_of_their_own_or_none(
    allowed: list[int], num_threads: int, targets: list[set[int]], draft: set[int]
) -> None:
    hardware, number = HardwareConfig(num_threads=num_threads), len(targets)
    found = [cores_for("target", allowed, hardware, rank=rank, num_target_ranks=number) for rank in range(number)]
    assert found == targets
    assert cores_for("draft", allowed, hardware, num_target_ranks=number) == draft
    assert cores_for("target", allowed, HardwareConfig(pin_cores=False)) == set()


@pytest.mark.skipif(len(allowed_cores()) < 2, reason="needs two cores")
def test_claimed_cores_and_threads_hold_in_the_process_and_its_torch() -> None:
    code = """
import os, sys
from amusd.config import EngineConfig, HardwareConfig
from amusd.runtime.cores import allowed_cores, pin_rank
from amusd.runtime.devices import with_devices
from amusd.types import Role
from launch.environment import set_environment
import threading
over = threading.Event()
thread = threading.Thread(target=over.wait)
thread.start()
first = min(os.sched_getaffinity(0))
config = EngineConfig(hardware=HardwareConfig(devices=("cpu", "cpu")))
set_environment(1)
assert with_devices(config).devices == ("cpu", "cpu")
pin_rank(config, "target", allowed_cores())
assert "torch" not in sys.modules
for thread in os.listdir("/proc/self/task"):
    assert os.sched_getaffinity(int(thread)) == {first}
import torch
assert torch.get_num_threads() == 1
assert not torch.cuda.is_initialized()
over.set()
"""
    env = {**environment(), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
