"""Assigns CPU cores to workers, before torch starts its threads. Imports no torch."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil

from amusd.config import EngineConfig, HardwareConfig
from amusd.types import Role


def allowed_cores() -> list[int]:
    """The cores of this process, in order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cores_for(
    role: Role, allowed: list[int], hardware: HardwareConfig, *, rank: int = 0, num_target_ranks: int = 1
) -> set[int]:
    """A worker's cores: the first for the target's ranks, the last for the draft; empty if unpinned or too few."""
    count = hardware.num_threads
    if not hardware.pin_cores or len(allowed) < (num_target_ranks + 1) * count:
        return set()
    start = rank * count if role == "target" else len(allowed) - count
    return set(allowed[start : start + count])


def pin_rank(config: EngineConfig, role: Role, allowed: list[int], rank: int = 0) -> None:
    """Pin this process, one of a role's ranks, to its share of the `allowed` cores."""
    size = config.target_tensor_parallel_size
    pin_to(cores_for(role, allowed, config.hardware, rank=rank, num_target_ranks=size))


def pin_to(cores: set[int]) -> None:
    """Run all threads of this process on these cores, if given and possible."""
    if cores and hasattr(os, "sched_setaffinity"):
        for thread in psutil.Process().threads():
            with suppress(OSError):  # the thread has just ended, or this process may not use the cores
                os.sched_setaffinity(thread.id, cores)
