"""Who gets which cores, threads and devices."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from amusd.config import HardwareConfig, RunConfig, TransportConfig
from amusd.runtime.cores import allowed_cores, cores_for
from amusd.types import Role
from launch.devices import claim_hardware, default_devices
from tests.launch.processes import environment


@pytest.mark.parametrize(
    ("allowed", "num_threads", "target", "draft"),
    [
        ([0, 1], 1, {0}, {1}),
        ([2, 5, 7], 1, {2}, {7}),
        ([0, 1, 2, 3], 2, {0, 1}, {2, 3}),
        ([0], 1, set(), set()),
        ([0, 1, 2], 2, set(), set()),
    ],
)
def test_target_and_draft_never_share_a_core(
    allowed: list[int], num_threads: int, target: set[int], draft: set[int]
) -> None:
    hardware = HardwareConfig(num_threads=num_threads)
    assert cores_for(Role.TARGET, allowed, hardware) == target
    assert cores_for(Role.DRAFT, allowed, hardware) == draft
    assert cores_for(Role.TARGET, allowed, HardwareConfig(pin_cores=False)) == set()


@pytest.mark.parametrize(
    ("num_gpus", "local_world_size", "devices"),
    [
        (0, 2, ("cpu", "cpu")),
        (1, 2, ("cpu", "cpu")),
        (2, 2, ("cuda:0", "cuda:1")),
        (8, 2, ("cuda:0", "cuda:1")),
        (1, 1, ("cuda:0", "cuda:0")),
        (0, 1, ("cpu", "cpu")),
    ],
)
def test_each_worker_gets_a_gpu_where_there_are_enough(
    num_gpus: int, local_world_size: int, devices: tuple[str, str]
) -> None:
    assert default_devices(num_gpus, local_world_size) == devices


@pytest.mark.skipif(len(allowed_cores()) < 2, reason="needs two cores")
def test_a_claimed_core_and_thread_count_hold_in_the_process_and_its_torch() -> None:
    code = """
import os, sys
from amusd.config import HardwareConfig, RunConfig
from amusd.types import Role
from launch.devices import claim_hardware
last = max(os.sched_getaffinity(0))
config = claim_hardware(RunConfig(hardware=HardwareConfig(devices=("cpu", "cpu"))), Role.DRAFT, local_world_size=2)
assert "torch" not in sys.modules
assert os.sched_getaffinity(0) == {last}
import torch
assert torch.get_num_threads() == 1
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("kind", "variable"), [("nccl", "2"), ("gloo", None), ("auto", None)])
def test_a_draft_that_dies_in_a_transfer_does_not_end_the_target(
    monkeypatch: pytest.MonkeyPatch, kind: str, variable: str | None
) -> None:
    monkeypatch.setattr("launch.devices.set_threads", lambda _number: None)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "")  # so that it is as before afterwards
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    transport = TransportConfig(kind=kind)  # type: ignore[arg-type]  # a parameter's type
    config = RunConfig(hardware=HardwareConfig(devices=("cuda:0", "cuda:1")), transport=transport)
    assert claim_hardware(config, Role.TARGET, local_world_size=2).transport == transport
    assert os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == variable
