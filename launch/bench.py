"""`amusd bench`: one process that measures, and starts the others that it needs itself."""

from __future__ import annotations

import dataclasses

from amusd.config import RunConfig
from amusd.errors import ConfigError

from .devices import count_gpus, default_devices, set_threads
from .run_directory import create_run_directory
from .terminal import tell


def run_bench(config: RunConfig) -> int:
    """Measure; returns the exit code. Raises `ConfigError` when the run directory cannot be used."""
    for name in ("target_tensor_parallel_size", "draft_tensor_parallel_size"):
        if (size := getattr(config, name)) > 1:
            raise ConfigError(f"{name}={size}: `amusd bench` measures one process of each role; allowed: 1")
    directory = create_run_directory(config)
    tell(f"run directory: {directory}")
    devices = config.hardware.devices or default_devices(count_gpus(), local_world_size=2)
    config = dataclasses.replace(config, hardware=dataclasses.replace(config.hardware, devices=devices))
    set_threads(config.hardware.num_threads)
    from amusd.cli import bench

    return bench(config, directory)
