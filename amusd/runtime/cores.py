"""Which CPU cores a worker gets. Standard library only: cores are given out before torch starts its threads."""

from __future__ import annotations

import os

from amusd.config import HardwareConfig
from amusd.types import Role


def allowed_cores() -> list[int]:
    """The cores this process may run on, in order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cores_for(role: Role, allowed: list[int], hardware: HardwareConfig) -> set[int]:
    """The first cores for the target, the last for the draft; none where the two would have to share."""
    if not hardware.pin_cores or len(allowed) < 2 * hardware.num_threads:
        return set()
    return set(allowed[: hardware.num_threads] if role is Role.TARGET else allowed[-hardware.num_threads :])


def pin_to(cores: set[int]) -> None:
    """Run this process on these cores alone; nothing for no cores, or where that cannot be done."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
